"""Decoders with transformers' own layers, and our attention, KV pool, linear layers and sampler.

Importing this package imports no transformers; its modules do.
"""
