"""Baton: two-tier serving of Hugging Face language models."""

__version__ = "0.1.0"
