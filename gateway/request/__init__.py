"""One request's life: a pure reducer, and the driver that does what it wants done."""
