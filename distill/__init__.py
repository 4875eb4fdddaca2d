"""`baton distill`: trains a small draft model on a target's outputs (docs/speculation.md)."""
