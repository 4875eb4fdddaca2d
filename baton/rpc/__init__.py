"""gRPC as Baton uses it: rich errors, channels and servers with one set of options, health and
reflection."""
