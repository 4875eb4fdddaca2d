"""Triton kernels, one file per file of twins: see baton_kernels.dispatch. Importing any of them
needs Triton.

Every launch sets explicitly whether products and sums may be fused, because Triton's default
differs between versions: fused only for matrix products; all other kernels round where their twins
do.
"""
