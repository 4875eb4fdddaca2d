"""The decode tier."""
