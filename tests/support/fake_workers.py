"""Workers without engines, for tests of the gateway under a virtual clock.

They keep the promises of baton.events: blocks are counted, tokens come by steps, memory that runs
out preempts the worst-ranked sequence. The next token is a function of the tokens before it, so
that whatever is lost, doubled or out of order changes the output. Faults are methods, called by the
test at the moment it wants.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.commands import Abort, HandOff, Pause, Resume, SequenceCommand
from baton.events import (
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    SequenceEvent,
    Tokens,
)
from baton.types import (
    UNKNOWN_NUMERICS,
    BlockCounts,
    FinishReason,
    KvLayout,
    KvSource,
    NumericsClass,
    Sample,
    SequenceSpec,
    Tier,
    TokenLogprobs,
    WorkerIdentity,
    WorkerInfo,
    WorkerLoad,
    finish_reason,
)
from gateway.routing.fleet import Fleet, WorkerState
from tests.support.fake_link import FakeLink

VOCAB_SIZE = 97
LAYOUT = KvLayout("f00d", 2, 1, 4, "float32", 4)


def next_token(token_ids: Sequence[int], seed: int = 0, choice: int = 0) -> int:
    """The token after `token_ids`: any change of them changes it."""
    data = repr((tuple(token_ids), seed, choice)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") % VOCAB_SIZE


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -(token_id + 1) / 16)


def next_sample(spec: SequenceSpec, token_ids: Sequence[int]) -> Sample:
    """The one after `token_ids`, which begin with the prompt of `spec`."""
    token_id = next_token(token_ids, spec.sampling.seed, spec.choice)
    return Sample(token_id, logprobs_of(token_id) if spec.sampling.logprobs >= 0 else None)


def expected_output(spec: SequenceSpec, max_model_len: int = 1 << 30) -> list[int]:
    """All tokens that `spec`, or the first of its choices, comes to; stop strings apart."""
    token_ids = list(spec.token_ids)
    output = list(spec.output_token_ids)
    while True:
        output.append(next_token(token_ids, spec.sampling.seed, spec.choice))
        token_ids.append(output[-1])
        if finish_reason(output[-1], len(output), len(token_ids), spec.sampling, max_model_len):
            return output


def expected_outputs(spec: SequenceSpec) -> list[list[int]]:
    """Expected tokens of each choice, or each output of the search; a search finds what choices
    would be."""
    return [expected_output(spec.choice_alone(number)) for number in range(spec.num_choices)]


def scores_of(spec: SequenceSpec) -> list[float]:
    """Scores of the outputs of a search."""
    return [-1.5 * number for number in range(len(expected_outputs(spec)))]


def prompt_logprobs_of(spec: SequenceSpec) -> tuple[TokenLogprobs, ...]:
    if spec.sampling.prompt_logprobs < 0:
        return ()
    return tuple(map(logprobs_of, spec.prompt_token_ids[1:]))


def text_of(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """A character per token; token 0 is special."""
    return "".join(
        chr(0x4E00 + token_id) for token_id in token_ids if token_id or not skip_special_tokens
    )


def make_info(
    worker_id: str,
    tier: Tier,
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_local_prefill_tokens: int = 0,
    max_model_len: int = 200,
    layout: KvLayout = LAYOUT,
    generation: int = 1,
    numerics: NumericsClass = UNKNOWN_NUMERICS,
) -> WorkerInfo:
    return WorkerInfo(
        identity=WorkerIdentity(worker_id, generation),
        tier=tier,
        model="fake",
        layout=layout,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_local_prefill_tokens=max_local_prefill_tokens,
        numerics=numerics,
    )


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence on a fake decode worker: one choice, or several that are one as yet, or a
    search."""

    handle: int
    spec: SequenceSpec
    choices: set[int]
    """Choices that were not cancelled, counted from the first."""
    num_blocks: int
    num_shared_blocks: int = 0
    """Blocks of the prompt that another choice's sequence counts."""
    is_running: bool = False
    is_paused: bool = False
    is_moving: bool = False
    token_ids: list[int] = field(default_factory=list)
    prefilled: Prefilled | None = None
    """To be reported before the first token, if the prompt is computed here."""

    @property
    def num_sequences(self) -> int:
        beam = self.spec.sampling.beam
        return beam.width if beam else self.spec.num_choices


class FakeDecode:
    """A decode worker. `latency` gives each message its time on the way."""

    def __init__(
        self, fleet: Fleet, address: str, info: WorkerInfo, *, step_s: float = 0.01
    ) -> None:
        self.info = info
        self.step_s = step_s
        self.latency: Callable[[], float] = lambda: 0.0
        self.links: list[FakeLink] = []
        """One per connection; the last is the one that stands."""
        self.num_deferrals = 0
        self.num_preemptions = 0
        self.tokens_per_step = 1
        self._fleet = fleet
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._sequences: dict[int, _Sequence] = {}
        self._num_free = info.num_blocks
        self._timer: asyncio.TimerHandle | None = None
        self._is_up = False
        self.is_mute = False
        """Whether openings get no answer."""
        self.is_draining = False
        self.peers: Sequence[FakeDecode] = ()
        """All decode workers, to hand sequences off to."""
        self.num_handed_off = 0
        self.transfer_s = 0.02
        self.ignores_pauses = False
        self.loses_transfers = False
        self.come_up()

    @property
    def num_sequences(self) -> int:
        return sum(sequence.num_sequences for sequence in self._sequences.values())

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    @property
    def specs(self) -> list[SequenceSpec]:
        """All that were ever opened here, in order."""
        return [spec for link in self.links for spec in link.specs]

    @property
    def num_opens(self) -> int:
        return len(self.specs)

    # Commands of the link.

    def on_open(
        self,
        handle: int,
        spec: SequenceSpec,
        source: KvSource,
        num_handles: int,
        send_to: bytes,  # noqa: ARG002, this one sends to nobody
    ) -> None:
        if not self.is_mute:
            self._admit(
                _Sequence(handle, spec, set(range(num_handles)), self._num_blocks(spec)), source
            )

    def on_command(self, handle: int, command: SequenceCommand) -> None:
        sequence = self._sequences.get(handle)
        match command:
            case Abort():
                self._abort(handle)
            case Pause() if sequence is not None and not self.ignores_pauses:
                self._pause(sequence)
            case Resume() if sequence is not None and not sequence.is_moving:
                sequence.is_paused = False
                self._start_steps()
            case HandOff(ticket) if sequence is not None and sequence.is_paused:
                sequence.is_moving = True
                self._loop.call_later(self.transfer_s, self._hand_off_to, sequence, ticket)

    def _abort(self, handle: int) -> None:
        for sequence in list(self._sequences.values()):
            if handle - sequence.handle in sequence.choices:
                sequence.choices.remove(handle - sequence.handle)
                if not sequence.choices:
                    self._free(sequence)

    def _pause(self, sequence: _Sequence) -> None:
        if sequence.is_running and not sequence.spec.sampling.beam:
            sequence.is_paused = True
            self._emit(sequence.handle, Paused())
        else:
            self._emit(sequence.handle, NotHandedOff("HANDOFF_FAILED", "it does not decode"))

    # What the test does to it.

    def come_up(self) -> None:
        self._is_up = True
        self.links.append(FakeLink(self, self._draw_latency, 1000 * len(self.links)))
        self._fleet.join(self._address, self.info, self.links[-1])
        self._report()

    def go_down(self) -> None:
        """As a killed worker: all is lost, and the gateway sees it by the connection."""
        self._is_up = False
        self._fleet.leave(self._address, WorkerState.UNREACHABLE, "killed by the test")
        self._sequences.clear()
        self._num_free = self.info.num_blocks
        self.links[-1].lose()

    def fail(self, reason: str, *, is_retriable: bool, choice: int | None = None) -> None:
        """Fail every sequence that is here, or those that run as this choice of their request."""
        for sequence in list(self._sequences.values()):
            if choice is None or (sequence.is_running and sequence.spec.choice == choice):
                self._leave(sequence, Failed(reason, "failed by the test", is_retriable))

    def preempt_all(self) -> None:
        for sequence in list(self._sequences.values()):
            self._leave(sequence, Preempted())

    def preempt(self, choice: int) -> None:
        """Preempt those that run as this choice of their request."""
        for sequence in list(self._sequences.values()):
            if sequence.is_running and sequence.spec.choice == choice:
                self._leave(sequence, Preempted())

    def emit_all(self, event: SequenceEvent) -> None:
        """Send something that this worker would not send by itself."""
        for sequence in self._sequences.values():
            self._emit(sequence.handle, event)

    def commit(self, ticket: bytes, samples: Sequence[Sample]) -> bool:
        """A prefill worker's KV has arrived whole: whether the ticket is one of this worker's, and
        alive."""
        address, _, handle = ticket.decode().rpartition("/")
        sequence = self._sequences.get(int(handle))
        if sequence is None or address != self._address:
            return False
        self._emit(sequence.handle, Committed(1.0, 100))
        self._run(sequence, samples)
        return True

    def drain(self) -> None:
        self.is_draining = True
        self._report()

    # Inside.

    def _hand_off_to(self, sequence: _Sequence, ticket: bytes) -> None:
        if (
            self._sequences.get(sequence.handle) is not sequence
            or not self._is_up
            or self.loses_transfers
        ):
            return
        num_tokens = sequence.spec.num_tokens + len(sequence.token_ids)
        if any(peer.take_over(ticket, num_tokens) for peer in self.peers):
            self.num_handed_off += 1
            self._leave(sequence, HandedOff())
        else:
            sequence.is_moving = False
            self._emit(sequence.handle, NotHandedOff("HANDOFF_FAILED", "nobody took it"))

    def take_over(self, ticket: bytes, num_tokens: int) -> bool:
        """Whether the ticket is one of this worker's, for a sequence of so many tokens; it runs
        here then."""
        address, _, handle = ticket.decode().rpartition("/")
        sequence = self._sequences.get(int(handle))
        if sequence is None or address != self._address or sequence.spec.num_tokens != num_tokens:
            return False
        self._emit(sequence.handle, Committed(1.0, 100))
        self._run(sequence, ())
        return True

    def _num_blocks(self, spec: SequenceSpec) -> int:
        return self.info.layout.num_blocks_for(spec.num_tokens + 1)

    def _admit(self, sequence: _Sequence, source: KvSource) -> None:
        handle, spec = sequence.handle, sequence.spec
        if self.is_draining:
            self._emit(handle, Failed("DRAINING", "takes no more", True))
            return
        num_sequences = self.num_sequences + sequence.num_sequences
        num_blocks = sequence.num_blocks + sequence.num_sequences - 1
        if num_blocks > self._num_free or num_sequences > self.info.max_num_seqs:
            self.num_deferrals += 1
            self._emit(handle, Deferred("no room"))
            self._report()
            return
        self._num_free -= sequence.num_blocks
        self._sequences[handle] = sequence
        is_short = spec.num_tokens <= self.info.max_local_prefill_tokens
        if source is KvSource.LOCAL or (is_short and source is KvSource.PREFILL):
            self._emit(handle, LocalPrefill(0))
            compute_ms = 1e3 * self.step_s
            sequence.prefilled = Prefilled(0, 0, 0.0, compute_ms, prompt_logprobs_of(spec))
            self._run(sequence, ())
        else:
            self._emit(handle, Offered(f"{self._address}/{handle}".encode(), 0))
        self._report()

    def _run(self, sequence: _Sequence, samples: Sequence[Sample]) -> None:
        """The KV is there, and the first tokens unless they are computed here: the choices fork."""
        if sequence.spec.sampling.beam:
            sequence.is_running = True
        else:
            self._fork(sequence, samples)
        self._start_steps()

    def _fork(self, group: _Sequence, samples: Sequence[Sample]) -> None:
        del self._sequences[group.handle]
        first = min(group.choices)
        for number in sorted(group.choices):
            sequence = _Sequence(
                group.handle + number,
                group.spec.choice_alone(number),
                {0},
                group.num_blocks if number == first else 0,
                0 if number == first else group.num_blocks - 1,
                is_running=True,
                prefilled=group.prefilled if number == first else None,
            )
            self._sequences[sequence.handle] = sequence
            if samples:
                sample = samples[number]
                index = len(sequence.spec.output_token_ids)
                sequence.token_ids.append(sample.token_id)
                finish = self._finish_of(sequence)
                event = Tokens(index, (sample,), finish)
                if finish is FinishReason.NONE:
                    self._emit(sequence.handle, event)
                else:
                    self._leave(sequence, event)

    def _start_steps(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self.step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        for sequence in sorted(self._sequences.values(), key=lambda s: s.spec.rank):
            if (
                sequence.handle in self._sequences
                and sequence.is_running
                and not sequence.is_paused
            ):
                self._produce(sequence)
        self._report()
        if any(
            sequence.is_running and not sequence.is_paused for sequence in self._sequences.values()
        ):
            self._start_steps()

    def _produce(self, sequence: _Sequence) -> None:
        if sequence.prefilled is not None:
            self._emit(sequence.handle, sequence.prefilled)
            sequence.prefilled = None
        if sequence.spec.sampling.beam:
            self._search(sequence)
            return
        samples: list[Sample] = []
        index = len(sequence.spec.output_token_ids) + len(sequence.token_ids)
        finish = FinishReason.NONE
        while len(samples) < self.tokens_per_step and finish is FinishReason.NONE:
            token_ids = [*sequence.spec.token_ids, *sequence.token_ids]
            if not self._grow(sequence, len(token_ids) + 1):
                break
            samples.append(next_sample(sequence.spec, token_ids))
            sequence.token_ids.append(samples[-1].token_id)
            finish = self._finish_of(sequence)
        num_drafts = len(samples) - 1
        event = Tokens(index, tuple(samples), finish, 2 * num_drafts, num_drafts)
        if finish is not FinishReason.NONE:
            self._leave(sequence, event)
        elif samples:
            self._emit(sequence.handle, event)

    def _search(self, sequence: _Sequence) -> None:
        """One step of a search, which takes as many as its longest output has tokens."""
        outputs = expected_outputs(sequence.spec)
        sequence.token_ids.append(0)
        if not self._grow(sequence, sequence.spec.num_tokens + len(sequence.token_ids)):
            return
        if len(sequence.token_ids) < max(map(len, outputs)):
            return
        self._free(sequence)
        found = zip(outputs, scores_of(sequence.spec), strict=True)
        for handle, (output, score) in enumerate(found, start=sequence.handle):
            samples = tuple(map(Sample, output))
            self._emit(handle, Tokens(0, samples, FinishReason.LENGTH, score=score))

    def _finish_of(self, sequence: _Sequence) -> FinishReason:
        num_output_tokens = len(sequence.spec.output_token_ids) + len(sequence.token_ids)
        num_tokens = sequence.spec.num_tokens + len(sequence.token_ids)
        sampling = sequence.spec.sampling
        token_id = sequence.token_ids[-1]
        return finish_reason(
            token_id, num_output_tokens, num_tokens, sampling, self.info.max_model_len
        )

    def _grow(self, sequence: _Sequence, num_tokens: int) -> bool:
        """Get a block for a sequence that needs one, from the worst-ranked one if there is none."""
        num_needed = self.info.layout.num_blocks_for(num_tokens) - sequence.num_shared_blocks
        while num_needed > sequence.num_blocks:
            if self._num_free:
                self._num_free -= 1
                sequence.num_blocks += 1
                continue
            worst = max(self._sequences.values(), key=lambda s: s.spec.rank)
            self.num_preemptions += 1
            self._leave(worst, Preempted())
            if worst is sequence:
                return False
        return True

    def _leave(self, sequence: _Sequence, event: SequenceEvent) -> None:
        if sequence.handle in self._sequences:
            self._emit(sequence.handle, event)
            self._free(sequence)

    def _free(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.handle]
        self._num_free += sequence.num_blocks
        self._report()

    def _draw_latency(self) -> float:
        return self.latency()

    def _emit(self, handle: int, event: SequenceEvent) -> None:
        self.links[-1].emit(handle, event)

    def _report(self) -> None:
        self._loop.call_later(0.001, self._report_now)

    def _report_now(self) -> None:
        if not self._is_up:
            return
        num_running = sum(sequence.is_running for sequence in self._sequences.values())
        self._fleet.report(
            self._address,
            WorkerLoad(
                num_running=num_running,
                num_waiting=len(self._sequences) - num_running,
                blocks=BlockCounts(self._num_free, 0, self.info.num_blocks - self._num_free),
                is_draining=self.is_draining,
            ),
        )


@dataclass(slots=True, eq=False)
class _Prompt:
    """A sequence on a fake prefill worker. choices: those that were not given up, counted from the
    first."""

    handle: int
    spec: SequenceSpec
    choices: set[int]
    send_to: bytes
    is_computed: bool = False
    work: asyncio.Task[None] | None = None


class FakePrefill:
    """A prefill worker: one prompt after the other, a token a `token_s`."""

    def __init__(
        self,
        fleet: Fleet,
        address: str,
        info: WorkerInfo,
        decodes: Sequence[FakeDecode],
        *,
        token_s: float = 0.001,
        commit_delay_s: float = 0.005,
    ) -> None:
        self.info = info
        self.links: list[FakeLink] = []
        """One per connection; the last is the one that stands."""
        self.num_prefills = 0
        self.max_pending_tokens = 0
        self.answer_delay_s = 0.0
        self.finish_early = False
        self.is_draining = False
        self._fleet = fleet
        self._address = address
        self._decodes = decodes
        self._token_s = token_s
        self._commit_delay_s = commit_delay_s
        self._loop = asyncio.get_running_loop()
        self._engine = asyncio.Lock()
        self._prompts: dict[int, _Prompt] = {}
        self.come_up()

    @property
    def num_in_flight(self) -> int:
        return len(self._prompts)

    def come_up(self) -> None:
        self.links.append(FakeLink(self, lambda: 0.0, 1000 * len(self.links)))
        self._fleet.join(self._address, self.info, self.links[-1])
        self._fleet.report(self._address, WorkerLoad())

    def go_down(self) -> None:
        """As a killed worker: all is lost, and the gateway sees it by the connection."""
        self._fleet.leave(self._address, WorkerState.UNREACHABLE, "killed by the test")
        for prompt in list(self._prompts.values()):
            self._forget(prompt)
        self.links[-1].lose()

    # Commands of the link.

    def on_open(
        self,
        handle: int,
        spec: SequenceSpec,
        source: KvSource,
        num_handles: int,
        send_to: bytes,
    ) -> None:
        assert source is KvSource.LOCAL, "nobody sends KV to this one"
        if self.is_draining:
            self._emit(handle, Failed("DRAINING", "takes no more", True))
            return
        prompt = _Prompt(handle, spec, set(range(num_handles)), send_to)
        self.num_prefills += 1
        self._prompts[handle] = prompt
        pending = sum(p.spec.num_tokens for p in self._prompts.values() if not p.is_computed)
        self.max_pending_tokens = max(self.max_pending_tokens, pending)
        prompt.work = self._loop.create_task(self._compute(prompt))

    def on_command(self, handle: int, command: SequenceCommand) -> None:
        if not isinstance(command, Abort):
            raise NotImplementedError
        for prompt in list(self._prompts.values()):
            if handle - prompt.handle in prompt.choices:
                prompt.choices.remove(handle - prompt.handle)
                if not prompt.choices:
                    self._forget(prompt)

    # Inside.

    async def _compute(self, prompt: _Prompt) -> None:
        asked_s, spec = self._loop.time(), prompt.spec
        self._emit(prompt.handle, LocalPrefill(0))
        async with self._engine:
            started_s = self._loop.time()
            await asyncio.sleep(self._token_s * spec.num_tokens)
        firsts = self._firsts(spec)
        goes_on = not all(finish for _, finish in firsts)
        delivery: asyncio.Future[bool] = self._loop.create_future()
        if prompt.send_to and goes_on:
            samples = tuple(sample for sample, _ in firsts)
            self._loop.call_later(self._commit_delay_s, self._deliver, prompt, samples, delivery)
        if self.answer_delay_s:
            await asyncio.sleep(self.answer_delay_s)
        queue_ms, compute_ms = (started_s - asked_s) * 1e3, (self._loop.time() - started_s) * 1e3
        scored = prompt_logprobs_of(spec)
        prompt.is_computed = True
        self._emit(prompt.handle, Prefilled(0, 0, queue_ms, compute_ms, scored))
        if not spec.sampling.beam:
            for handle, (sample, finish) in enumerate(firsts, start=prompt.handle):
                event = Tokens(len(spec.output_token_ids), (sample,), finish)
                self._emit(handle, event)
        if prompt.send_to and goes_on:
            if await delivery:
                self._emit(prompt.handle, HandedOff())
            else:
                self._emit(prompt.handle, Failed("HANDOFF_FAILED", "nobody took it", True))
        self._prompts.pop(prompt.handle, None)

    def _deliver(
        self, prompt: _Prompt, samples: tuple[Sample, ...], delivery: asyncio.Future[bool]
    ) -> None:
        if prompt.handle in self._prompts and not delivery.done():
            is_taken = any(decode.commit(prompt.send_to, samples) for decode in self._decodes)
            delivery.set_result(is_taken)

    def _forget(self, prompt: _Prompt) -> None:
        self._prompts.pop(prompt.handle, None)
        if prompt.work is not None:
            prompt.work.cancel()

    def _emit(self, handle: int, event: SequenceEvent) -> None:
        self.links[-1].emit(handle, event)

    def _firsts(self, spec: SequenceSpec) -> list[tuple[Sample, FinishReason]]:
        """The first token of each choice, and whether it ends the choice; a search has one for the
        decode worker alone."""
        if spec.sampling.beam:
            return [(next_sample(spec, spec.token_ids), FinishReason.NONE)]
        firsts = []
        for number in range(spec.num_choices):
            sample = next_sample(spec.choice_alone(number), spec.token_ids)
            finish = finish_reason(
                sample.token_id,
                len(spec.output_token_ids) + 1,
                spec.num_tokens + 1,
                spec.sampling,
                self.info.max_model_len,
            )
            firsts.append((sample, FinishReason.STOP if self.finish_early else finish))
        return firsts


def with_block_size(layout: KvLayout, block_size: int) -> KvLayout:
    return replace(layout, block_size=block_size)
