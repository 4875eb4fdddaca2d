"""Which of several outputs are returned when only the best are wanted. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from baton.errors import EngineFault
from gateway.output.output import Piece


def best(outputs: Sequence[Piece], num_returned: int) -> list[Piece]:
    """The outputs with the highest mean log probability, best first, each with that mean as its score.

    outputs: each whole, in one piece. Of like ones the earlier is taken. Raises EngineFault if a log probability lacks.
    """
    scored = [replace(output, score=_mean_logprob(output)) for output in outputs]
    scored.sort(key=lambda output: -(output.score or 0.0))
    return scored[:num_returned]


def _mean_logprob(output: Piece) -> float:
    logprobs = [sample.logprobs.logprob for sample in output.samples if sample.logprobs]
    if not logprobs or len(logprobs) < len(output.samples):
        raise EngineFault("tokens came without the log probabilities that choose among outputs")
    return math.fsum(logprobs) / len(logprobs)
