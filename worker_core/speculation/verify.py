"""Which drafts a step confirms."""

from __future__ import annotations

from collections.abc import Sequence


def verify(drafts: Sequence[int], draws: Sequence[int]) -> int:
    """How many of `drafts` are what the target draws itself: draws[i] is its token after
    drafts[:i].

    len(draws) == len(drafts) + 1. The step's tokens are draws[:num_accepted + 1]. Each of them
    follows a prefix that the target drew itself and is drawn with the key of its position, so that
    they are the tokens of decoding one by one, whatever the drafts are. A draft drawn with the same
    keys by the same coupling agrees with probability at least (1 - tv) / (1 + tv), tv being the
    total variation distance of the two distributions (Daliri, Musco, Suresh 2024, "Coupling without
    communication and drafter-invariant speculative decoding", section 3).
    """
    if len(draws) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} draws, not {len(draws)}")
    pairs = zip(drafts, draws, strict=False)
    return next((i for i, (draft, draw) in enumerate(pairs) if draft != draw), len(drafts))
