"""Drafts by a head over the target's hidden states, which draws with the target's keys.

A head goes on from the target's states where it has them: of each token that the target has
computed. Its KV of drafts is made of states of its own, so that it is dropped after each proposal,
and made again of the target's states once the drafts are accepted, in the same step that gives the
next draft.

A head that states are kept for again begins anew, with the tokens from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.lease import BlockLease
from engine.kv.pool import BlockPool
from worker_core.speculation.interface import DraftRequest, Proposal
from worker_core.speculation.proposer import Job, States, StatesProposer

if TYPE_CHECKING:
    import torch


#: Tokens that a head which begins anew in the midst of an output sees before it drafts: of fewer, a
#: trial would not show what its drafts are worth.
_MIN_CONTEXT = 8


class Head(Protocol):
    """See engine.torch.head_runner.HeadRunner."""

    def fuse(self, states: torch.Tensor) -> torch.Tensor: ...

    def step(
        self, batch: Batch, states: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[tuple[tuple[int, ...], ...], torch.Tensor] | None: ...


@dataclass(slots=True, eq=False)
class _Context:
    """What the head has of a sequence: KV of the tokens [first, first + num_computed) is in the
    lease."""

    lease: BlockLease
    sampling: Sampling
    first: int
    num_computed: int = 0


@dataclass(slots=True, eq=False)
class _Job(Job):
    """states: for the tokens that are not computed."""

    context: _Context
    num_computed: int
    states: torch.Tensor
    alternatives: list[tuple[int, ...]] = field(default_factory=list)

    def next_slice(self) -> SequenceSlice:
        context, request = self.context, self.request
        start = context.first + self.num_computed
        row = SampleRow(
            len(self.token_ids) - start - 1,
            context.sampling,
            self.token_ids,
            request.num_prompt_tokens,
            request.choice,
        )
        new = self.token_ids[start:]
        return SequenceSlice(new, self.num_computed, context.lease.block_ids, (row,))


class HeadProposer(StatesProposer):
    """Implements Proposer."""

    def __init__(
        self,
        head: Head,
        states: States,
        pool: BlockPool,
        clock: Callable[[], float],
        widths: Sequence[int] = (),
    ) -> None:
        """pool: over the head's blocks. The others: see StatesProposer."""
        super().__init__(states, clock, widths)
        self._head, self._pool = head, pool
        self._contexts: dict[Hashable, _Context] = {}

    def forget(self, key: Hashable) -> None:
        super().forget(key)
        self._drop(key)

    def _draft(self, requests: Sequence[DraftRequest]) -> Mapping[Hashable, Proposal]:
        jobs = {request.key: job for request in requests if (job := self._start(request))}
        working = list(jobs.values())
        while working:
            working = self._extend(working)
        return {k: Proposal(job.drafts, tuple(job.alternatives)) for k, job in jobs.items()}

    def _drop(self, key: Hashable) -> None:
        context = self._contexts.pop(key, None)
        if context is not None:
            context.lease.release()

    def _can_draft(self, request: DraftRequest) -> bool:
        """Whether the target's states are here: those after what the head has computed, or enough
        to begin anew with."""
        num_tokens = len(request.token_ids)
        first = self._states.first(request.key, request.token_ids)
        if first is None:
            return False
        context = self._contexts.get(request.key)
        if context is not None and context.first + context.num_computed == first + 1:
            return True
        # After a handoff there is no state of the prompt's last token.
        num_own = max(1, num_tokens - 1 - request.num_prompt_tokens)
        return num_tokens - 1 - first >= min(_MIN_CONTEXT, num_own)

    def _start(self, request: DraftRequest) -> _Job | None:
        """None where the target's states are missing, or blocks."""
        key, num_tokens = request.key, len(request.token_ids)
        if not self._can_draft(request):
            return None
        position, states = self._states.take(key, request.token_ids)
        context = self._contexts.get(key)
        # A token goes in with the state of the position before it.
        if context is not None and context.first + context.num_computed != position + 1:
            self._drop(key)
            context = None
        if context is None:
            lease = self._pool.lease(b"", (), 1, shares_prefixes=False)
            if lease is None:
                return None
            context = self._contexts[key] = _Context(lease, request.draft_sampling, position + 1)
        end = num_tokens + request.max_num_drafts - 1 - context.first
        if context.lease.prepare_write(context.num_computed, end) is None:
            self._drop(key)
            return None
        job = _Job(
            request, list(request.token_ids), context, context.num_computed, self._head.fuse(states)
        )
        context.num_computed = num_tokens - context.first
        return job

    def _extend(self, working: Sequence[_Job]) -> list[_Job]:
        """One draft more for each job; the jobs that want another."""
        place = working[0].num_drafts
        found = self._head.step(
            Batch(tuple(job.next_slice() for job in working)),
            [job.states for job in working],
            self._widths[place] if place < len(self._widths) else 1,
        )
        if found is None:
            for job in working:
                self._drop(job.request.key)
            return []
        token_ids, states = found
        for index, (job, (token_id, *others)) in enumerate(zip(working, token_ids, strict=True)):
            job.num_computed = len(job.token_ids) - job.context.first
            job.token_ids.append(token_id)
            job.alternatives.append(tuple(others))
            job.states = states[index : index + 1]
        return [job for job in working if job.num_drafts < job.request.max_num_drafts]
