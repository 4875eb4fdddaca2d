"""Drafts by a smaller model, which draws with the target's keys.

The draft model has an engine and blocks of its own, and the target's tokens. A sequence's KV there
lags behind what the target has emitted, and may hold tokens that the target did not draw: before
drafting it is cut back to what both agree on and caught up, in the same forward that gives the
first draft. When blocks run out, the sequence that was drafted for longest ago loses its own."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import BatonError, ConfigError
from baton.types import Sampling
from engine.interface import (
    Batch,
    Engine,
    EngineSpec,
    SampleRow,
    SequenceSlice,
    forward_guarded,
)
from engine.kv.lease import BlockLease
from engine.kv.pool import BlockPool
from worker_core.speculation.interface import NOTHING, DraftRequest, Estimate, Proposal
from worker_core.speculation.proposer import Job, TimedProposer


def check_specs(target: EngineSpec, draft: EngineSpec) -> None:
    """Raises ConfigError unless each draft is a token id of the target, and the draft model can go
    back to where one was not accepted."""
    if draft.groups.cannot_rewind:
        raise _mismatch(draft.model, f"it has {draft.groups.cannot_rewind}")
    if draft.vocab_size != target.vocab_size:
        raise _mismatch(
            draft.model,
            f"its vocabulary has {draft.vocab_size} tokens, that of {target.model} has "
            f"{target.vocab_size}",
        )


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ConfigError unless both folders' tokenizers give every token the same id. One without
    a file is trusted."""
    ours, theirs = target / "tokenizer.json", draft / "tokenizer.json"
    if not (ours.is_file() and theirs.is_file()):
        return
    if _vocabulary(ours) != _vocabulary(theirs):
        raise _mismatch(str(draft), f"its tokenizer differs from that of {target}")


def _vocabulary(path: Path) -> tuple[Any, Any]:
    """Tokens with their ids, and the added ones."""
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return content["model"].get("vocab"), added


def _mismatch(draft: str, reason: str) -> ConfigError:
    return ConfigError.of(
        "speculative_model", draft, f"{reason}; give a model with the same tokenizer"
    )


@dataclass(slots=True, eq=False)
class _Draft:
    """A sequence in the draft model. computed: tokens with KV in the lease. num_settled: leading
    ones that the target is known to have."""

    lease: BlockLease
    sampling: Sampling
    computed: list[int] = field(default_factory=list)
    num_settled: int = 0

    def grow(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in total; return whether there is room."""
        return self.lease.prepare_write(len(self.computed), num_tokens) is not None

    def cut_back(self, token_ids: Sequence[int]) -> None:
        """Forget computed tokens beyond `token_ids`, and the last of `token_ids`: its logits are
        needed."""
        end = min(len(self.computed), len(token_ids) - 1)
        agreed = min(self.num_settled, end)
        while agreed < end and self.computed[agreed] == token_ids[agreed]:
            agreed += 1
        del self.computed[agreed:]
        self.num_settled = agreed


@dataclass(slots=True, eq=False)
class _Job(Job):
    """max_num_new: most tokens of it in one forward; one that lags further behind is caught up a
    piece at a time, and has no drafts until then."""

    draft: _Draft
    max_num_new: int

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - len(self.draft.computed)

    @property
    def num_new(self) -> int:
        return min(self.num_missing, self.max_num_new)

    def next_slice(self) -> SequenceSlice:
        start = len(self.draft.computed)
        end = start + self.num_new
        row = SampleRow(
            offset=self.num_new - 1,
            sampling=self.draft.sampling,
            token_ids=self.token_ids,
            num_prompt_tokens=self.request.num_prompt_tokens,
            choice=self.request.choice,
        )
        return SequenceSlice(
            self.token_ids[start:end],
            start,
            self.draft.lease.block_ids,
            (row,) if end == len(self.token_ids) else (),
            self.request.num_prompt_tokens,
        )


class DraftModelProposer(TimedProposer):
    """Implements Proposer."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        max_num_batched_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """pool: over the engine's blocks. max_num_batched_tokens: of one forward. clock: in
        seconds."""
        super().__init__(clock)
        self._engine = engine
        self._pool = pool
        self._max_num_batched_tokens = max_num_batched_tokens
        self._drafts: OrderedDict[Hashable, _Draft] = OrderedDict()  # used longest ago first

    def estimate(self, requests: Sequence[DraftRequest]) -> list[Estimate]:
        return [self._estimate(request) for request in requests]

    def _draft(self, requests: Sequence[DraftRequest]) -> Mapping[Hashable, Proposal]:
        jobs = self._start(requests)
        working = list(jobs.values())
        while working:
            working = self._extend(working)
        return {key: Proposal(job.drafts) for key, job in jobs.items()}

    def forget(self, key: Hashable) -> None:
        draft = self._drafts.pop(key, None)
        if draft is not None:
            draft.lease.release()

    def _estimate(self, request: DraftRequest) -> Estimate:
        # The last draft is drawn and not computed.
        room = self._engine.spec.max_model_len - len(request.token_ids) + 1
        num_drafts = min(request.max_num_drafts, room)
        return Estimate(num_drafts) if num_drafts > 0 else NOTHING

    def _start(self, requests: Sequence[DraftRequest]) -> dict[Hashable, _Job]:
        """Jobs of the requests that there is room for, in blocks and in the first forward."""
        jobs: dict[Hashable, _Job] = {}
        budget = self._max_num_batched_tokens
        for request in requests:
            draft = self._lease(request, jobs)
            if draft is None:
                continue
            draft.cut_back(request.token_ids)
            if budget > 0:
                job = _Job(request, list(request.token_ids), draft, budget)
                budget -= job.num_new
                jobs[request.key] = job
        return jobs

    def _lease(self, request: DraftRequest, busy: dict[Hashable, _Job]) -> _Draft | None:
        """Blocks for the sequence and its drafts, if need be those of sequences that are not
        drafted for now."""
        num_tokens = len(request.token_ids) + request.max_num_drafts - 1
        if num_tokens > self._engine.spec.max_model_len:
            return None
        draft = self._drafts.get(request.key)
        while not (draft.grow(num_tokens) if draft else self._has_room(num_tokens)):
            victim = next((k for k in self._drafts if k not in busy and k != request.key), None)
            if victim is None:
                return None
            self.forget(victim)
        if draft is None:
            lease = self._pool.lease(b"", (), num_tokens, shares_prefixes=False)
            if lease is None:
                return None
            draft = self._drafts[request.key] = _Draft(lease, request.draft_sampling)
        self._drafts.move_to_end(request.key)
        return draft

    def _has_room(self, num_tokens: int) -> bool:
        return self._pool.num_blocks_for(num_tokens) <= self._pool.num_available

    def _extend(self, working: Sequence[_Job]) -> list[_Job]:
        """One draft more for each job; the jobs that want another."""
        batch = Batch(tuple(job.next_slice() for job in working))
        more = []
        for job, outcome in zip(working, forward_guarded(self._engine, batch), strict=True):
            if isinstance(outcome, BatonError):
                self.forget(job.request.key)
                continue
            start = len(job.draft.computed)
            job.draft.computed += job.token_ids[start : start + job.num_new]
            job.token_ids += [sample.token_id for sample in outcome]
            if outcome and job.num_drafts < job.request.max_num_drafts:
                more.append(job)
        return more
