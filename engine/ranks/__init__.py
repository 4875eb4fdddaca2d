"""An engine of several processes: rank 0 is the worker, the others follow it. See
docs/tensor_parallel.md."""
