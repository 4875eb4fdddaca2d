"""Quantised weights: checkpoint layouts, storage, and quantisation."""
