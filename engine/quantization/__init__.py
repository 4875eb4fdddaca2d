"""Quantised weights: what a checkpoint says of them, how they are stored, and rounding to them."""
