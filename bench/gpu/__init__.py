"""What the kernels do on a GPU: see __main__."""
