"""Speculation: guess several tokens of a sequence cheaply, and let one forward confirm those that
are right.

proposer: who guesses (ngram, draft_model). policy: how many guesses are worth their cost.
speculator: both, as the core sees them. verify: which guesses were right. A guess changes when a
token is told, never which.
"""
