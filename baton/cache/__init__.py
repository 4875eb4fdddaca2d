"""Who owns which KV block, and which blocks hold which prefix."""
