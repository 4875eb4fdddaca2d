"""Which way a prompt goes. Pure.

    hand off    a prefill worker computes it and sends its KV to a decode worker
    share       a decode worker computes it, in chunks beside the sequences that decode there
    colocated   a worker that computes the prompts of all its sequences takes it

The way with the first token soonest wins, if it keeps the targets. Sharing slows sequences down
that were promised short gaps: without a target of these it has to be clearly sooner, unless the
first token would be late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.types import Slo

#: A decode worker that shares prompts has to have the first token within this share of the time
#: that a handoff takes.
SHARING_GAIN = 0.8

#: Share of the target of the first token that an estimate may reach.
TTFT_SHARE = 0.9

#: With a target of the first token, prompts queued at a worker take at most this share of it, so
#: that the gateway's order counts.
QUEUE_SHARE = 0.25

#: While some wait that can still be on time, one place of so many goes to requests that are late.
LATE_EVERY = 16


@dataclass(frozen=True, slots=True)
class Way:
    """One way for a prompt.

    prefill: address of the worker that hands it off; None if `decode` computes it.
    ttft_s: estimated time to the first token: the queue, and the tokens that no cache has.
    is_colocated: whether `decode` computes all its prompts, so that its gaps allow for them.
    """

    prefill: str | None
    decode: str
    ttft_s: float
    is_colocated: bool = False


def choose_way(ways: Sequence[Way], slo: Slo) -> Way:
    """The best of at least one way; a handoff among equals."""
    handoffs_s = [way.ttft_s for way in ways if way.prefill]
    is_late = slo.ttft_s is not None and min(handoffs_s, default=0.0) > TTFT_SHARE * slo.ttft_s
    gain = 1.0 if is_late or slo.tpot_s is not None else SHARING_GAIN

    def cost(way: Way) -> tuple[float, bool]:
        if way.prefill:
            return way.ttft_s, False
        return way.ttft_s if way.is_colocated else way.ttft_s / gain, True

    return min(ways, key=cost)
