"""CUDA graphs of decode steps, their static buffers, and kernel warm-up."""
