"""The engine's interface, its loop, and its two forms: torch, and the oracle."""
