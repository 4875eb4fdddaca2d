"""Token sampling: host-side preparation for the sampling ops of baton_kernels."""
