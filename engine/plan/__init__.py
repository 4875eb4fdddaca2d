"""Plans a deployment before there is one: memory, degrees, times at the roofline, tiers. Pure
arithmetic, except for `host`, `picture` and `__main__`."""
