"""Baton's use of gRPC: rich errors, channels and servers with one set of options, health and
reflection."""
