"""What a scheduler may ask of an engine: one forward for prefill, decode and verification, and a
pool of KV blocks; and whom a step's exception is charged to, so that the others of its batch go on
(promise 4).

An engine is driven by one thread. Its KV pool is read and written by transfer threads too, but
never in a block that the engine's current batch writes: blocks have one owner at a time.
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
from engine.kv.layout import LayerGroups, groups_of

_log = logging.getLogger(__name__)

#: Called during a forward, in its thread, when layers [first, first + count) of all slices are in
#: the KV pool.
LayersDone = Callable[[int, int], None]


#: The new tokens of a slice whose one token is still being drawn: a place to put it.
FOLLOWING: tuple[int, ...] = (0,)


class SampleRow(NamedTuple):
    """Asks for one token after one position of a slice. One or more for each sequence in each step:
    of the immutable kind that costs least, as a slice is.

    offset: which of the slice's new tokens is the last one the sample may see.
    token_ids, num_prompt_tokens: the sequence up to and with that token, for penalties; output
    follows the prompt.
    num_undrawn_tokens: how many of those at the end are not in token_ids, because they are still
    being drawn: 0, or 1 in a slice that follows a row. Then nothing may be asked of the sample that
    depends on them, as penalties and bad words do; but of drafts, which may be wrong. The random
    number is keyed by (sampling.seed, number of output tokens so far, choice).
    allowed: bit t % 8 of byte t // 8 says whether token t may be chosen; None allows all. At least
    one is allowed.
    scored_token_id: if set, nothing is drawn: the sample is this token, with
    sampling.prompt_logprobs alternatives, and token_ids may be empty. In a beam search
    (sampling.beam), the sample is the likeliest allowed token, and its logprobs.top are the
    likeliest allowed ones with their log probabilities, as many as
    engine.sampling.beam_search.num_candidates says.
    """

    offset: int
    sampling: Sampling
    token_ids: Sequence[int]
    num_prompt_tokens: int
    choice: int = 0
    allowed: bytes | None = None
    scored_token_id: int | None = None
    num_undrawn_tokens: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_undrawn_tokens - self.num_prompt_tokens


class SequenceSlice(NamedTuple):
    """One sequence's part of a batch: `token_ids` are new at positions start, start + 1, ...

    KV of positions below `start` is in the blocks of `block_table`; that of the new tokens is
    written there. len(block_table) * block_size >= start + len(token_ids).
    num_prompt_tokens: length of the sequence's prompt; only engines whose spec has a
    `shared_prompt_limit` read it.
    follows: if set, the slice's one new token is what that row of the launch just before draws,
    rows being counted over all its slices; token_ids is then FOLLOWING.
    adapter: which of the engine's adapters computes it; empty for the model alone.
    key: the sequence's name to whoever watches its hidden states; None if nobody may.
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
    """One step's work. No block that one slice writes appears in another slice's table."""

    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is: constant after loading.

    shared_prompt_limit: if set, KV of a prompt with more tokens than this depends on the prompt's
    length (dynamic RoPE scaling): such a prompt must neither take blocks from a prefix cache nor
    leave any there.
    max_num_launches: launches that may be under way at once, 1 or 2. Of two, slices of the second
    may follow rows of the first.
    computes_aside: whether a launch returns before its batch is computed, so that the host may do
    something else meanwhile.
    """

    model: str
    layout: KvLayout
    num_blocks: int
    vocab_size: int
    max_model_len: int
    shared_prompt_limit: int | None = None
    max_num_launches: int = 1
    computes_aside: bool = False
    numerics: NumericsClass = UNKNOWN_NUMERICS
    dtype_reason: str = ""
    """Why it computes in that type, for people."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that slices may ask for, in order."""

    @property
    def groups(self) -> LayerGroups:
        """Which layers keep KV alike."""
        return groups_of(self.layout)

    def shares_prefixes(self, num_prompt_tokens: int) -> bool:
        """Whether KV of such a prompt may be found by, and taken from, other prompts that begin
        alike."""
        if self.groups.cannot_rewind:
            return False
        return self.shared_prompt_limit is None or num_prompt_tokens <= self.shared_prompt_limit


class DeviceLost(Exception):
    """The device fails at whatever it is given from now on: nothing but a new process can follow,
    and no request is at fault."""


class Launched(Protocol):
    """A batch that an engine was given. It is computed after all that were given before it."""

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        """Wait until the batch is computed; per slice, one sample per row of it. Called once, in
        the order of launches."""
        ...


class Engine(Protocol):
    """A loaded model with its KV pool."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def kv(self) -> KvPool: ...

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """Begin to write the new tokens' KV and to draw samples. The batch is the caller's again
        when this returns.

        Any exception, here or when the samples are asked for, leaves the blocks that the batch
        writes undefined and all others untouched; but for DeviceLost, after which nothing is.
        """
        ...

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        """Launch a batch and wait for its samples."""
        return self.launch(batch, layers_done).samples()


#: What a slice came to: one sample per row of it, or why it failed.
SliceOutcome = tuple[Sample, ...] | BatonError


#: Gives what is called during a forward of these slices of a batch alone.
LayersDoneOf = Callable[[range], LayersDone]


def forward_guarded(
    engine: Engine, batch: Batch, layers_done_of: LayersDoneOf | None = None
) -> tuple[SliceOutcome, ...]:
    """Run the batch; if it raises, run each slice alone, and let only those fail that raise again.

    A slice that runs again writes the same KV into the same blocks, so its layers may be reported
    again that were reported already.
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
    """A launch; None if it failed: forward_guarded says by whose fault."""
    try:
        return engine.launch(batch, layers_done)
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it comes again when the batch is run guarded
        _log.warning("a batch of %d could not be launched", len(batch.slices), exc_info=error)
        return None


def try_collect(launched: Launched) -> tuple[tuple[Sample, ...], ...] | None:
    """A launch's samples; None if it failed: forward_guarded says by whose fault."""
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
    """Whether the prompt's log probabilities are still to be reported; cached KV has none."""
    return spec.sampling.prompt_logprobs >= 0 and not spec.output_token_ids


def num_scored_rows(spec: SequenceSpec, start: int, num_new: int) -> int:
    """Rows that scored_rows gives for the same chunk."""
    return len(_scored_positions(spec, start, num_new))


def _scored_positions(spec: SequenceSpec, start: int, num_new: int) -> range:
    """Positions of a chunk after which the prompt's next token is scored."""
    if not wants_prompt_logprobs(spec):
        return range(0)
    return range(start, min(start + num_new, len(spec.prompt_token_ids) - 1))


def scored_rows(spec: SequenceSpec, start: int, num_new: int) -> tuple[SampleRow, ...]:
    """Rows that score the prompt's tokens after those of a chunk [start, start + num_new); none if
    nobody asked."""
    positions = _scored_positions(spec, start, num_new)
    if not positions:
        return ()
    prompt = spec.prompt_token_ids
    return tuple(
        SampleRow(
            offset=position - start,
            sampling=spec.sampling,
            # Penalties do not apply, and one copy of the prompt per token is quadratic.
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
) -> tuple[SampleRow, ...]:
    """One row for each choice of the sequence after its last token, `offset` in its slice; one for
    a beam search.

    token_ids, num_undrawn_tokens: see SampleRow.
    """
    row = SampleRow(
        offset,
        spec.sampling,
        token_ids,
        len(spec.prompt_token_ids),
        spec.choice,
        allowed,
        num_undrawn_tokens=num_undrawn_tokens,
    )
    if spec.num_choices == 1 or spec.sampling.beam:
        return (row,)
    choices = range(spec.choice, spec.choice + spec.num_choices)
    return tuple(row._replace(choice=choice) for choice in choices)
