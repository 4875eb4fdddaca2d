"""The ways KV travels: within a process, through shared memory, over TCP."""
