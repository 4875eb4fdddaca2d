"""The life of one request: a pure reducer, and the driver that carries out its actions."""
