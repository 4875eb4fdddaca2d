"""KV memory: its layout, the pool of blocks, groups of layers, and tensors."""
