"""An engine of several processes: rank 0 is the worker, the other ranks follow its commands. See
docs/parallelism.md."""
