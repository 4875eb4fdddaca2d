"""Request metrics and spans."""
