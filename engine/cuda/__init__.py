"""What a CUDA device needs besides: streams, graphs, tables in its memory."""
