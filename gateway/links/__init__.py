"""Links to workers."""
