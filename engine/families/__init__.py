"""Families of models: how each config.json is read, and the parts of each layer."""
