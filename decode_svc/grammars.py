"""The grammars of what a worker runs: compiled while KV is awaited, and followed up to the last token before each step."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import EngineFault
from baton.grammar import Matchers
from baton.types import SequenceSpec
from decode_svc.state import DecodeState, Member


class Grammars:
    """The core's side of structured output."""

    def __init__(self, state: DecodeState, matchers: Matchers) -> None:
        self._state = state
        self._matchers = matchers

    def prepare(self, spec: SequenceSpec) -> None:
        """A sequence comes: begin to compile its grammar."""
        self._matchers.prepare(spec.sampling)

    def ready(self, members: Sequence[Member]) -> Sequence[Member]:
        """Those whose grammars are compiled. All, if none is: then there is nothing to do but to wait for one."""
        ready = [member for member in members if not member.awaits_grammar(self._matchers)]
        return ready or members

    def follow(self, granted: Sequence[tuple[Member, int]]) -> list[tuple[Member, int]]:
        """Find what may come next of members that were granted a step. Those that cannot go on fail, and are left out."""
        able = []
        for member, num_new in granted:
            try:
                member.follow_grammar(self._matchers)
            except EngineFault as error:
                self._state.fail(member, error)
            else:
                able.append((member, num_new))
        return able
