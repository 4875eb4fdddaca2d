"""Speculative decoding: propose several tokens of a sequence cheaply, and let one forward confirm
those that are right.

interface: what the core asks for. ngram, draft_model: who proposes. draft_lengths: how many drafts
are worth their cost. speculator: both, as the core sees them.
"""
