"""Chooses the roles of workers from measured load, learned costs and latency targets."""
