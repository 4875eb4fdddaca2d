"""Decoders of our own over torch: parameters, steps, forward."""
