"""`baton distill`: trains a small model to say what a target says, for it to draft for the target
(docs/speculation.md)."""
