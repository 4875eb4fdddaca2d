"""A simulated fleet: the real gateway and schedulers, and workers that take as long as recorded."""
