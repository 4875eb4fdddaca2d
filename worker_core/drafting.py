"""Drafts beside what a step was granted: of whom to ask them, room for them, and which of them the
step confirms.

They take what is left of the step's tokens and of the blocks: nobody waits or leaves for a draft. A
step that prefills has none, for it is as large as it may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.errors import BatonError
from baton.types import Sample
from engine.interface import SliceOutcome
from engine.kv.lease import BlockCopy
from worker_core.commands import SequenceKey
from worker_core.sequence import Branch, Draft, WorkerSequence
from worker_core.speculation.interface import DraftRequest, Proposal, Speculation
from worker_core.state import CoreState, SequenceGroup

#: By sequence key.
Drafts = Mapping[SequenceKey, Draft]


class Drafting:
    """The core's side of speculation, step by step: start, then end."""

    def __init__(
        self, state: CoreState, speculation: Speculation | None, max_num_batched_tokens: int
    ) -> None:
        """speculation: None to draft nothing."""
        self._state = state
        self._speculation = speculation
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_rows = 0
        self._asked: list[tuple[WorkerSequence, int]] = []
        """Sequences that drafts were asked for in this step, and how many tokens they had."""
        self._withheld: set[SequenceKey] = set()
        """Sequences whose last step failed with drafts in it: the next one shows whether it was
        they."""

    def start(
        self, granted: Sequence[tuple[SequenceGroup, int]]
    ) -> tuple[Drafts, tuple[BlockCopy, ...]]:
        """Drafts for a step that computes what was granted, and what must be copied before they are
        written."""
        self._asked, self._num_rows = [], 0
        if self._speculation is None or any(group.is_prefilling for group, _ in granted):
            return {}, ()
        self._num_rows = sum(num_new for _, num_new in granted)
        requests = [
            request
            for group, _ in granted
            if isinstance(group, WorkerSequence)
            and (request := self._request(group, self._speculation))
        ]
        self._withheld.clear()
        num_spare = self._max_num_batched_tokens - self._num_rows
        planned = self._speculation.plan(requests, self._num_rows, num_spare)
        drafts: dict[SequenceKey, Draft] = {}
        copies: list[BlockCopy] = []
        branching: list[tuple[WorkerSequence, Proposal]] = []
        for (sequence, _), wanted in zip(self._asked, planned, strict=True):
            if not wanted.token_ids:
                continue
            if found := self._make_room(sequence, sequence.draft(wanted.token_ids)):
                drafts[sequence.key], copied = found
                copies += copied
                # What a branch copies must not be a copy that is still to be made.
                if wanted.alternatives and not copied:
                    branching.append((sequence, wanted))
        num_spare -= sum(draft.num_rows for draft in drafts.values())
        for sequence, wanted in branching:
            chain = drafts[sequence.key]
            draft, copied = self._branch_out(sequence, chain, wanted, num_spare)
            drafts[sequence.key] = draft
            num_spare -= draft.num_rows - chain.num_rows
            copies += copied
        return drafts, tuple(copies)

    def settle(
        self, sequence: WorkerSequence, draft: Draft, outcomes: Sequence[SliceOutcome]
    ) -> tuple[Sample, ...] | None:
        """The tokens that a step with drafts gives a sequence, which from now on has the blocks
        with their KV; of outcomes, one for each of its slices. None if some failed: the step is
        made again without drafts."""
        spare = [branch.lease for branch in draft.branches]
        tokens: list[Sample] | None = None
        chain, *others = outcomes
        if any(isinstance(outcome, BatonError) for outcome in outcomes):
            self._withheld.add(sequence.key)
        elif not isinstance(chain, BatonError):
            num_accepted = verify(draft.token_ids, [sample.token_id for sample in chain])
            tokens = list(chain[: num_accepted + 1])
            path = (*draft.token_ids[:num_accepted], tokens[-1].token_id)
            for place, branch in enumerate(draft.branches):
                behind = others[place]
                if branch.token_ids == path and not isinstance(behind, BatonError):
                    tokens += behind
                    spare[place], sequence.lease = sequence.lease, branch.lease
                    break
        for lease in spare:
            lease.release()
        return None if tokens is None else tuple(tokens)

    def end(self, drafts: Drafts) -> None:
        """The step is over, and sequences have what they got of it."""
        if self._speculation is None or not self._num_rows:
            return
        for sequence, num_known in self._asked:
            self._speculation.record(sequence.key, sequence.token_ids[num_known:])
        num_more = sum(draft.num_rows for draft in drafts.values())
        self._speculation.on_step_end(self._num_rows, num_more)

    def _request(self, sequence: WorkerSequence, speculation: Speculation) -> DraftRequest | None:
        """None where choices or beams fork at the next token, which is the first; and where no
        draft can be of use."""
        if (
            not speculation.is_due(sequence.key)
            or sequence.key in self._withheld
            or not sequence.has_begun
        ):
            return None
        spec, num_tokens = sequence.spec, len(sequence.token_ids)
        # A step gives one token more than drafts: neither past max_tokens nor past the model's
        # length.
        num_left = min(sequence.max_num_tokens, self._state.spec.max_model_len) - num_tokens
        most = min(speculation.max_num_drafts, num_left - 1)
        if most <= 0:
            return None
        self._asked.append((sequence, num_tokens))
        return DraftRequest(
            sequence.key,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            most,
            spec.sampling,
            spec.choice,
        )

    def _make_room(
        self, sequence: WorkerSequence, draft: Draft
    ) -> tuple[Draft, tuple[BlockCopy, ...]] | None:
        """As many of the drafts as there are blocks for when every group may still take one; None
        if that is none."""
        num_spare = self._state.pool.num_available - len(self._state.groups)
        for num_drafts in range(len(draft.token_ids), 0, -1):
            num_needed = sequence.num_blocks_to_write(1 + num_drafts)
            if num_needed and num_needed > num_spare:
                continue
            copies = sequence.prepare(1 + num_drafts)
            if copies is not None:
                first = Draft(draft.token_ids[:num_drafts], draft.masks[: num_drafts + 1])
                return first, copies
        return None

    def _branch_out(
        self, sequence: WorkerSequence, draft: Draft, wanted: Proposal, num_spare: int
    ) -> tuple[Draft, tuple[BlockCopy, ...]]:
        """The draft with as many alternatives, the first ones first, as there are blocks for, and
        num_spare rows; and what must be copied for them. Each has a lease of its own, forked from
        the sequence's."""
        state, start, num_left = self._state, sequence.next_position, num_spare
        branches: list[Branch] = []
        copies: list[BlockCopy] = []
        places = zip(range(len(draft.token_ids)), wanted.alternatives, strict=False)
        paths = [(*draft.token_ids[:i], token) for i, tokens in places for token in tokens]
        for path in paths:
            found = sequence.draft(path)
            if len(found.token_ids) < len(path):
                continue
            if 1 + len(path) > num_left:
                break
            lease, end = sequence.lease.fork(start), start + 1 + len(path)
            num_left_blocks = state.pool.num_available - len(state.groups)
            copied = None
            if lease.num_blocks_to_write(start, end) <= num_left_blocks:
                copied = lease.prepare_write(start, end)
            if copied is None:
                lease.release()
                break
            copies += copied
            num_left -= 1 + len(path)
            branches.append(Branch(path, found.masks[-1], lease))
        return replace(draft, branches=tuple(branches)), tuple(copies)


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
