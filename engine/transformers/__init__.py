"""Decoders whose layers are transformers' own, with our attention, KV pool, linear layers and
sampler.

Importing this package imports no transformers; its modules do.
"""
