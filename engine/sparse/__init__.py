"""Sparse decode: steps that read some of a sequence's KV blocks. Off by default."""
