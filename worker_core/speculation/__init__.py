"""Speculative decoding: propose several tokens of a sequence cheaply, and let one forward confirm
those that are right.

    interface      what the core asks for, and what proposes
    proposer       what proposers have in common that take time
    ngram          drafts from what the sequence's own tokens repeat
    draft_model    drafts by a smaller model
    head           drafts by a head over the target's hidden states
    medusa         drafts by several, all from one state
    draft_lengths  how many drafts are worth their cost
    speculator     drafts and lengths, as the core sees them
"""
