"""Families of models: what config.json says of them, and the parts of their layers."""
