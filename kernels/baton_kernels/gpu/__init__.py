"""Triton kernels, one file per file of twins: see baton_kernels.dispatch. Importing any of them needs Triton."""
