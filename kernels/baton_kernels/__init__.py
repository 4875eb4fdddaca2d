"""The operations of a decoder, one per file: formula, shapes, and a plain torch twin."""
