"""The beams of one sequence in the decode batch. They step together and share the blocks of common
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import EngineFault
from baton.types import Sample, SequenceSpec
from engine.grammar import Matcher
from engine.interface import SampleRow, SequenceSlice
from engine.kv.lease import BlockCopy, BlockLease
from engine.kv.pool import BlockPool
from engine.sampling.beam_search import BeamSearch, Hypothesis
from worker_core.sequence import Draft, Stage, WorkerSequence


@dataclass(frozen=True, slots=True)
class _Beam:
    """One running beam. The lease holds KV of all its tokens but the last.

    matcher: state of the grammar after its tokens; the parent's, or None, until `follow_grammar`;
    None without a grammar.
    """

    token_ids: tuple[int, ...]
    lease: BlockLease
    matcher: Matcher | None


class BeamGroup:
    """Replaces its root sequence once the root's KV is complete. Owned by the engine loop."""

    is_prefilling = False
    runs_ahead = is_drawing = is_drawing_last = False
    """Never ahead (see WorkerSequence): the sampled tokens decide which beams continue."""

    def __init__(
        self, root: WorkerSequence, first: Sample, pool: BlockPool, max_model_len: int
    ) -> None:
        """Take over the root's lease. first: the sample after the root, with its candidates."""
        self.stream = root.stream
        self.handle = root.handle
        self.spec: SequenceSpec = root.spec
        self.key = root.key
        self.width = self.num_growing_places = root.width
        self.rank = root.rank
        self.stage = Stage.RUNNING
        self.matcher_future = root.matcher_future
        self._pool = pool
        self._search = BeamSearch(root.spec.sampling, root.spec.num_tokens, max_model_len)
        self._beams: tuple[_Beam, ...] = (_Beam(root.spec.token_ids, root.lease, root.matcher),)
        self._num_computed_tokens = root.spec.num_tokens
        self._step([first])

    @property
    def leases(self) -> tuple[BlockLease, ...]:
        """One lease per running beam."""
        return tuple(beam.lease for beam in self._beams)

    @property
    def is_over(self) -> bool:
        """Whether the search has ended; `outputs` are final then and nothing is left to compute."""
        return self._search.num_running == 0

    @property
    def outputs(self) -> tuple[Hypothesis, ...]:
        """The outputs found, best first; at most num_returned."""
        return self._search.best()

    @property
    def num_missing_tokens(self) -> int:
        return len(self._beams)

    @property
    def min_new_tokens(self) -> int:
        return len(self._beams)

    @property
    def num_exclusive_blocks(self) -> int:
        return self._pool.num_exclusive_blocks([beam.lease for beam in self._beams])

    def num_blocks_to_write(self, num_new: int) -> int:  # noqa: ARG002, all beams or none
        start = self._num_computed_tokens
        return self._pool.num_blocks_to_write([b.lease for b in self._beams], start, start + 1)

    def prepare(self, num_new: int) -> tuple[BlockCopy, ...] | None:
        """Make room as WorkerSequence.prepare does, for all beams or none."""
        if self.num_blocks_to_write(num_new) > self._pool.num_available:
            return None
        start = self._num_computed_tokens
        copies: list[BlockCopy] = []
        for beam in self._beams:
            own = beam.lease.prepare_write(start, start + 1)
            if own is None:  # never write only some of the beams
                raise EngineFault("there was room for all beams' blocks, and then not for one")
            copies += own
        return tuple(copies)

    def follow_grammar(self) -> None:
        """As WorkerSequence.follow_grammar, for all beams."""
        if self.matcher_future is None:
            return
        num_prompt_tokens = len(self.spec.prompt_token_ids)
        followed = []
        for beam in self._beams:
            matcher = beam.matcher or self.matcher_future.matcher()
            matcher.advance_many(beam.token_ids[num_prompt_tokens + matcher.num_tokens :])
            matcher.allowed()
            followed.append(replace(beam, matcher=matcher))
        self._beams = tuple(followed)

    def slices(
        self,
        num_new: int,  # noqa: ARG002, all beams or none
        draft: Draft | None,  # noqa: ARG002
    ) -> tuple[SequenceSlice, ...]:
        """One slice per beam: its last token, with a row for its candidates. Beams have no
        drafts."""
        start, num_prompt_tokens = self._num_computed_tokens, len(self.spec.prompt_token_ids)
        return tuple(
            SequenceSlice(
                token_ids=beam.token_ids[start:],
                start=start,
                block_table=beam.lease.block_ids,
                rows=(
                    SampleRow(
                        offset=0,
                        sampling=self.spec.sampling,
                        token_ids=beam.token_ids,
                        num_prompt_tokens=num_prompt_tokens,
                        allowed=beam.matcher.allowed() if beam.matcher else None,
                    ),
                ),
                num_prompt_tokens=num_prompt_tokens,
                adapter=self.spec.adapter,
            )
            for beam in self._beams
        )

    def advance(self, samples: Sequence[Sample]) -> None:
        """Continue with the next beams after a step's samples. Beams without a successor release
        their blocks."""
        self._num_computed_tokens += 1
        self._step(samples)

    def release(self) -> None:
        """Release all blocks."""
        for beam in self._beams:
            beam.lease.release()
        self._beams = ()

    def _step(self, samples: Sequence[Sample]) -> None:
        step = self._search.step([s.logprobs.top if s.logprobs else () for s in samples])
        parents = self._beams
        self._beams = tuple(
            _Beam(
                (*parents[parent].token_ids, token_id),
                parents[parent].lease.fork(self._num_computed_tokens),
                _forked(parents[parent].matcher),
            )
            for parent, token_id in zip(step.parents, step.token_ids, strict=True)
        )
        for beam in parents:
            beam.lease.release()
        for beam in self._beams:
            beam.lease.slide(beam.token_ids, self._num_computed_tokens)


def _forked(matcher: Matcher | None) -> Matcher | None:
    return matcher.fork() if matcher else None
