"""Triton kernels, one file per file of twins: see baton_kernels.dispatch. Importing any of them
needs Triton.

Every launch says whether products and sums may be fused, as Triton's default changes between
versions: only where the result is of matrix products; elsewhere a kernel rounds where its twin
does.
"""
