"""Output path: merges tokens, detokenizes them, and writes pieces to the client."""
