"""How often drafts are right, learned from those that were compared with what the target drew.

A trial is one draft whose predecessors were all right. The first draft of a proposal is judged by
its grade, later ones
together: once a guess is on the right track, it mostly stays there. A sequence's own trials count
first; where it has few, those of all sequences stand in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

#: Category of drafts after the first of a proposal; grades are not negative.
LATER = -1

#: Weight that a trial keeps when one more comes: about the last 8 of a sequence count, the last 200
#: of all.
_OWN_DECAY = 0.88
_ALL_DECAY = 0.995

#: Trials of its own that weigh as much as those of all sequences.
_PRIOR_TRIALS = 3.0

#: What is believed before any trial, and how many trials that is worth.
_FIRST_GUESS = 0.5
_FIRST_GUESS_TRIALS = 2.0


class _Rate:
    """A share of successes in which old trials fade."""

    __slots__ = ("num_right", "num_trials")

    def __init__(self) -> None:
        self.num_right = 0.0
        self.num_trials = 0.0

    def add(self, is_right: bool, decay: float) -> None:
        self.num_right = self.num_right * decay + is_right
        self.num_trials = self.num_trials * decay + 1.0

    def share(self, prior: float, prior_trials: float) -> float:
        return (self.num_right + prior * prior_trials) / (self.num_trials + prior_trials)


class Acceptance:
    """Chances of drafts, by sequence and category."""

    def __init__(self) -> None:
        self._own: dict[Hashable, dict[int, _Rate]] = {}
        self._all: defaultdict[int, _Rate] = defaultdict(_Rate)

    def chance(self, key: Hashable, category: int) -> float:
        """In (0, 1): how likely the next draft of this category is right, given that those before
        it are."""
        own = self._own.get(key, {}).get(category)
        prior = self._all[category].share(_FIRST_GUESS, _FIRST_GUESS_TRIALS)
        return prior if own is None else own.share(prior, _PRIOR_TRIALS)

    def judge(
        self, key: Hashable, grade: int, drafts: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Compare drafts, also ones that nobody verified, with what the sequence got at their
        places."""
        own = self._own.setdefault(key, {})
        category = grade
        for draft, token in zip(drafts, tokens, strict=False):
            is_right = draft == token
            self._all[category].add(is_right, _ALL_DECAY)
            own.setdefault(category, _Rate()).add(is_right, _OWN_DECAY)
            if not is_right:
                return
            category = LATER

    def forget(self, key: Hashable) -> None:
        self._own.pop(key, None)
