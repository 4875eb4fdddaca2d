"""The grammars of what a worker runs: compiled while KV is awaited, and followed up to the last token before each step."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import EngineFault
from decode_svc.state import DecodeState, Member


def follow_grammars(
    state: DecodeState, granted: Sequence[tuple[Member, int]]
) -> list[tuple[Member, int]]:
    """Find what may come next of members that were granted a step. Those that cannot go on fail, and are left out."""
    able = []
    for grant in granted:
        member, _ = grant
        try:
            if member.order:
                member.follow_grammar()
        except EngineFault as error:
            state.fail(member, error)
        else:
            able.append(grant)
    return able
