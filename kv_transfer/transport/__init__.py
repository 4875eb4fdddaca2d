"""Transports for KV: within a process, through shared memory, over TCP."""
