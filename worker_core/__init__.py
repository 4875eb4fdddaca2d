"""The core of a worker of either tier: admits sequences, computes them, and ends them or hands them
off."""
