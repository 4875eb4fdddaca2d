"""What comes in: validated, rendered and tokenized, with nothing that could still be wrong."""
