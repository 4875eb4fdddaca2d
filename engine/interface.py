"""Interface between schedulers and engines: one forward for prefill, decode and verification, and a
pool of KV blocks. Also isolates faults: an exception in a step is charged to the slices that cause
it, and the other sequences continue (promise 4).

One thread drives an engine. Transfer threads also read and write its KV pool, but never blocks that
the current batch writes: a block has one owner at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.errors import BatonError, EngineFault
from baton.types import (
    UNKNOWN_NUMERICS,
    KvLayout,
    NumericsClass,
    Sample,
    Sampling,
    SequenceSpec,
)
from engine.kv.interface import KvPool
from engine.kv.kv_ranks import KvRanks
from engine.kv.layout import LayerGroups, groups_of
from engine.token_counts import TokenCounts

_log = logging.getLogger(__name__)

#: Called in the forward's thread when layers [first, first + count) of all slices are in the KV
#: pool.
LayersDone = Callable[[int, int], None]


#: Placeholder for the new token of a slice while the previous launch still computes it.
FOLLOWING: tuple[int, ...] = (0,)


class SampleRow(NamedTuple):
    """Requests one sample after one position of a slice. A NamedTuple, because each step makes at
    least one per sequence.

    offset: index in the slice's new tokens of the last token that the sample depends on. token_ids,
    num_prompt_tokens: the sequence up to that token (prompt, then output), for penalties.
    num_undrawn_tokens: tokens at the end that token_ids lacks because they are still being
    computed: 0, or 1 in a slice that follows a row; then penalties and bad words must be off,
    except for drafts, which may be wrong. The random number is keyed by (sampling.seed, number of
    output tokens so far, choice). allowed: bit t % 8 of byte t // 8 allows token t; None allows
    all; at least one is allowed. scored_token_id: if set, nothing is drawn: the sample is this
    token, with sampling.prompt_logprobs alternatives, and token_ids may be empty. counts: of
    token_ids, or of the tokens that they begin with; None if nothing is counted yet. In a beam
    search (sampling.beam), the sample is the likeliest allowed token, and logprobs.top has the
    likeliest allowed tokens, engine.sampling.beam_search.num_candidates of them.
    """

    offset: int
    sampling: Sampling
    token_ids: Sequence[int]
    num_prompt_tokens: int
    choice: int = 0
    allowed: bytes | None = None
    scored_token_id: int | None = None
    num_undrawn_tokens: int = 0
    counts: TokenCounts | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_undrawn_tokens - self.num_prompt_tokens


class SequenceSlice(NamedTuple):
    """One sequence's part of a batch: new tokens `token_ids` at positions start, start + 1, ...

    KV of positions before `start` is in the blocks of `block_table`; KV of the new tokens is
    written there. len(block_table) * block_size >= start + len(token_ids). num_prompt_tokens:
    length of the prompt, read only by engines with a `shared_prompt_limit`. follows: row of the
    previous launch, counted over all its slices, that draws this slice's only new token; token_ids
    is then FOLLOWING. adapter: name of the LoRA adapter; empty for the base model. key: identifies
    the sequence to an observer of its hidden states; None if there must be no observer.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    rows: tuple[SampleRow, ...] = ()
    num_prompt_tokens: int = 0
    follows: int | None = None
    adapter: str = ""
    key: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. A block written by one slice is in no other slice's table."""

    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Properties of an engine, constant after loading.

    shared_prompt_limit: if set, KV of longer prompts (in tokens) depends on the prompt's length
    (dynamic RoPE scaling), so they must neither use nor fill a prefix cache. max_num_launches:
    maximum concurrent launches. is_pipelined: whether these have to be of different work, one for
    each pipeline stage; otherwise there are at most two, and slices of the second may follow rows
    of the first. computes_aside: whether launch returns before the batch is computed, so that the
    host can work meanwhile.
    """

    model: str
    layout: KvLayout
    num_blocks: int
    vocab_size: int
    max_model_len: int
    shared_prompt_limit: int | None = None
    max_num_launches: int = 1
    is_pipelined: bool = False
    computes_aside: bool = False
    numerics: NumericsClass = UNKNOWN_NUMERICS
    dtype_reason: str = ""
    """Reason for the dtype, for people."""
    adapters: tuple[str, ...] = ()
    """Names of the available adapters, in order."""

    @property
    def groups(self) -> LayerGroups:
        """Layer groups of the KV layout."""
        return groups_of(self.layout)

    def shares_prefixes(self, num_prompt_tokens: int) -> bool:
        """Whether KV of a prompt of this length may be shared with prompts that have a common
        prefix."""
        if self.groups.cannot_rewind:
            return False
        return self.shared_prompt_limit is None or num_prompt_tokens <= self.shared_prompt_limit


class DeviceLost(Exception):
    """The device has failed permanently. No request is at fault; only a new process can
    continue."""


class Launched(Protocol):
    """A launched batch. Batches are computed in the order of launch."""

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        """Wait until the batch is computed; returns one sample per row, by slice. Called once, in
        the order of launches."""
        ...


class Engine(Protocol):
    """A loaded model with its KV pool."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def kv(self) -> KvPool: ...

    @property
    def kv_ranks(self) -> KvRanks | None:
        """Ranks that send and receive their own KV; None if the KV channel uses `kv`."""
        return None

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """Start writing the new tokens' KV and drawing samples. The caller may reuse the batch on
        return.

        An exception, here or from samples(), leaves the blocks that the batch writes undefined and
        all others untouched; after DeviceLost all are undefined.
        """
        ...

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        """Launch a batch and wait for its samples."""
        return self.launch(batch, layers_done).samples()

    def close(self) -> None:
        """End processes that the engine runs beside this one; it cannot be used afterwards.
        Idempotent."""
        return


#: What a slice came to: one sample per row of it, or why it failed.
SliceOutcome = tuple[Sample, ...] | BatonError


#: From a range of slices in the batch: the layers_done callback of a forward of these slices only.
LayersDoneOf = Callable[[range], LayersDone]


def forward_guarded(
    engine: Engine, batch: Batch, layers_done_of: LayersDoneOf | None = None
) -> tuple[SliceOutcome, ...]:
    """Run the batch; if it raises, run each slice alone, and fail only those that raise again.

    A repeated slice writes the same KV into the same blocks, and may report layers again.
    """
    num_slices = len(batch.slices)
    try:
        return engine.forward(batch, layers_done_of and layers_done_of(range(num_slices)))
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is charged to one request below
        if num_slices == 1:
            return (_fault(error),)
        _log.warning("a batch of %d failed; running each alone", num_slices, exc_info=error)
    return tuple(
        _forward_alone(engine, part, layers_done_of and layers_done_of(range(index, index + 1)))
        for index, part in enumerate(batch.slices)
    )


def try_launch(engine: Engine, batch: Batch, layers_done: LayersDone) -> Launched | None:
    """Launch; returns None on failure: forward_guarded then finds the slices at fault."""
    try:
        return engine.launch(batch, layers_done)
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it comes again when the batch is run guarded
        _log.warning("a batch of %d could not be launched", len(batch.slices), exc_info=error)
        return None


def try_collect(launched: Launched) -> tuple[tuple[Sample, ...], ...] | None:
    """Samples of a launch; None on failure: forward_guarded then finds the slices at fault."""
    try:
        return launched.samples()
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("a launched batch failed", exc_info=error)
        return None


def _forward_alone(
    engine: Engine, part: SequenceSlice, layers_done: LayersDone | None
) -> SliceOutcome:
    return forward_guarded(engine, Batch((part,)), layers_done and (lambda _: layers_done))[0]


def _fault(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    _log.error("a request failed in the engine", exc_info=error)
    return EngineFault(f"the engine failed on this request: {type(error).__name__}")


def wants_prompt_logprobs(spec: SequenceSpec) -> bool:
    """Whether the prompt's log probabilities are still to be computed; cached KV provides none."""
    return spec.sampling.prompt_logprobs >= 0 and not spec.output_token_ids


def num_scored_rows(spec: SequenceSpec, start: int, num_new: int) -> int:
    """Number of rows returned by scored_rows for the same chunk."""
    return len(_scored_positions(spec, start, num_new))


def _scored_positions(spec: SequenceSpec, start: int, num_new: int) -> range:
    """Positions of a chunk with a next prompt token to score."""
    if not wants_prompt_logprobs(spec):
        return range(0)
    return range(start, min(start + num_new, len(spec.prompt_token_ids) - 1))


def scored_rows(spec: SequenceSpec, start: int, num_new: int) -> tuple[SampleRow, ...]:
    """Rows that score the prompt tokens following those of chunk [start, start + num_new); empty
    unless requested."""
    positions = _scored_positions(spec, start, num_new)
    if not positions:
        return ()
    prompt = spec.prompt_token_ids
    return tuple(
        SampleRow(
            offset=position - start,
            sampling=spec.sampling,
            # Penalties do not apply, and a copy of the prompt per token would be quadratic.
            token_ids=(),
            num_prompt_tokens=len(prompt),
            scored_token_id=prompt[position + 1],
        )
        for position in positions
    )


def first_rows(
    spec: SequenceSpec,
    offset: int,
    token_ids: Sequence[int],
    allowed: bytes | None,
    num_undrawn_tokens: int = 0,
    counts: TokenCounts | None = None,
) -> tuple[SampleRow, ...]:
    """Rows after the sequence's last token, `offset` in its slice: one per choice, or one for a
    beam search.

    token_ids, num_undrawn_tokens, counts: see SampleRow.
    """
    row = SampleRow(
        offset,
        spec.sampling,
        token_ids,
        len(spec.prompt_token_ids),
        spec.choice,
        allowed,
        num_undrawn_tokens=num_undrawn_tokens,
        counts=counts,
    )
    if spec.num_choices == 1 or spec.sampling.beam:
        return (row,)
    choices = range(spec.choice, spec.choice + spec.num_choices)
    return tuple(row._replace(choice=choice) for choice in choices)
