"""The memory that KV lies in."""
