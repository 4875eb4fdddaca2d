"""The core of a worker of either tier: sequences come in, are computed, and end or are handed
off."""
