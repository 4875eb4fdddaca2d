"""What is measured of requests."""
