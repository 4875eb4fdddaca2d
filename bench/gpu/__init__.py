"""Correctness and speed of the kernels on a GPU: see __main__."""
