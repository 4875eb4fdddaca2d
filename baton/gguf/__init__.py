"""GGUF files, the format of llama.cpp, read as checkpoints of transformers. Imports no torch."""
