"""Conversations: rendered by a model's template, and what its outputs have beside text."""
