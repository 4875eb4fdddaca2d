"""Ways to workers."""
