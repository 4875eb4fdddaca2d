"""Workers without engines, for tests of the gateway under a virtual clock.

They keep the promises of baton.events: blocks are counted, tokens come by steps, memory that runs out preempts the
worst-ranked sequence. The next token is a function of the tokens before it, so that whatever is lost, doubled or out of
order changes the output. Faults are methods, called by the test at the moment it wants.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.errors import WorkerLost
from baton.events import (
    Committed,
    DecodeEvent,
    Deferred,
    Failed,
    HandedOff,
    HandOffFailed,
    Offered,
    Paused,
    Preempted,
    PrefillsHere,
    PromptScored,
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
from gateway.fleet import Fleet, WorkerState
from gateway.links import First, OnFirst, PrefillResult
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
    """Of each choice, or each output of the search; a search finds what choices would be."""
    return [expected_output(spec.choice_alone(number)) for number in range(spec.num_choices)]


def scores_of(spec: SequenceSpec) -> list[float]:
    """Of the outputs of a search."""
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
class _Seat:
    """A sequence on a fake decode worker: one choice, or several that are one as yet, or a search."""

    handle: int
    spec: SequenceSpec
    choices: set[int]
    """Those that were not given up, counted from the first."""
    num_blocks: int
    num_shared_blocks: int = 0
    """Blocks of the prompt that another choice's seat counts."""
    is_running: bool = False
    is_paused: bool = False
    is_moving: bool = False
    token_ids: list[int] = field(default_factory=list)

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
        self._seats: dict[int, _Seat] = {}
        self._num_free = info.num_blocks
        self._timer: asyncio.TimerHandle | None = None
        self._is_up = False
        self.is_mute = False
        """Whether openings get no answer."""
        self.is_draining = False
        self.peers: Sequence[FakeDecode] = ()
        """All decode workers, to hand sequences over to."""
        self.num_handed_over = 0
        self.transfer_s = 0.02
        self.ignores_pauses = False
        self.loses_transfers = False
        self.come_up()

    @property
    def num_sequences(self) -> int:
        return sum(seat.num_sequences for seat in self._seats.values())

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

    # What it is told by the link.

    def obey_open(
        self, handle: int, spec: SequenceSpec, source: KvSource, num_handles: int
    ) -> None:
        if not self.is_mute:
            self._admit(
                _Seat(handle, spec, set(range(num_handles)), self._num_blocks(spec)), source
            )

    def obey_abort(self, handle: int) -> None:
        for seat in list(self._seats.values()):
            if handle - seat.handle in seat.choices:
                seat.choices.remove(handle - seat.handle)
                if not seat.choices:
                    self._free(seat)

    def obey_pause(self, handle: int) -> None:
        seat = self._seats.get(handle)
        if seat is None or self.ignores_pauses:
            return
        if seat.is_running and not seat.spec.sampling.beam:
            seat.is_paused = True
            self._tell(handle, Paused())
        else:
            self._tell(handle, HandOffFailed("HANDOFF_FAILED", "it does not decode"))

    def obey_resume(self, handle: int) -> None:
        seat = self._seats.get(handle)
        if seat is not None and not seat.is_moving:
            seat.is_paused = False
            self._start_steps()

    def obey_hand_off(self, handle: int, ticket: bytes) -> None:
        seat = self._seats.get(handle)
        if seat is not None and seat.is_paused:
            seat.is_moving = True
            self._loop.call_later(self.transfer_s, self._hand_over, seat, ticket)

    # What the test does to it.

    def come_up(self) -> None:
        self._is_up = True
        self.links.append(FakeLink(self, self._draw_latency, 1000 * len(self.links)))
        self._fleet.join_decode(self._address, self.info, self.links[-1])
        self._report()

    def go_down(self) -> None:
        """As a killed worker: all is lost, and the gateway is told by the connection."""
        self._is_up = False
        self._fleet.leave(self._address, WorkerState.UNREACHABLE, "killed by the test")
        self._seats.clear()
        self._num_free = self.info.num_blocks
        self.links[-1].lose()

    def fail(self, reason: str, *, is_retriable: bool, choice: int | None = None) -> None:
        """Fail every sequence that is here, or those that run as this choice of their request."""
        for seat in list(self._seats.values()):
            if choice is None or (seat.is_running and seat.spec.choice == choice):
                self._leave(seat, Failed(reason, "failed by the test", is_retriable))

    def preempt_all(self) -> None:
        for seat in list(self._seats.values()):
            self._leave(seat, Preempted())

    def preempt(self, choice: int) -> None:
        """Preempt those that run as this choice of their request."""
        for seat in list(self._seats.values()):
            if seat.is_running and seat.spec.choice == choice:
                self._leave(seat, Preempted())

    def tell_all(self, event: DecodeEvent) -> None:
        """Send something that this worker would not send by itself."""
        for seat in self._seats.values():
            self._tell(seat.handle, event)

    def commit(self, ticket: bytes, samples: Sequence[Sample]) -> None:
        """A prefill worker's KV has arrived whole."""
        address, _, handle = ticket.decode().rpartition("/")
        seat = self._seats.get(int(handle))
        if seat is None or address != self._address:
            return
        self._tell(seat.handle, Committed(1.0, 100))
        self._run(seat, samples)

    def drain(self) -> None:
        self.is_draining = True
        self._report()

    # Inside.

    def _hand_over(self, seat: _Seat, ticket: bytes) -> None:
        if self._seats.get(seat.handle) is not seat or not self._is_up or self.loses_transfers:
            return
        num_tokens = seat.spec.num_tokens + len(seat.token_ids)
        if any(peer.take_over(ticket, num_tokens) for peer in self.peers):
            self.num_handed_over += 1
            self._leave(seat, HandedOff())
        else:
            seat.is_moving = False
            self._tell(seat.handle, HandOffFailed("HANDOFF_FAILED", "nobody took it"))

    def take_over(self, ticket: bytes, num_tokens: int) -> bool:
        """Whether the ticket is one of this worker's, for a sequence of so many tokens; it runs here then."""
        address, _, handle = ticket.decode().rpartition("/")
        seat = self._seats.get(int(handle))
        if seat is None or address != self._address or seat.spec.num_tokens != num_tokens:
            return False
        self._tell(seat.handle, Committed(1.0, 100))
        self._run(seat, ())
        return True

    def _num_blocks(self, spec: SequenceSpec) -> int:
        return self.info.layout.num_blocks_for(spec.num_tokens + 1)

    def _admit(self, seat: _Seat, source: KvSource) -> None:
        handle, spec = seat.handle, seat.spec
        if self.is_draining:
            self._tell(handle, Failed("DRAINING", "takes no more", True))
            return
        num_sequences = self.num_sequences + seat.num_sequences
        num_blocks = seat.num_blocks + seat.num_sequences - 1
        if num_blocks > self._num_free or num_sequences > self.info.max_num_seqs:
            self.num_deferrals += 1
            self._tell(handle, Deferred("no room"))
            self._report()
            return
        self._num_free -= seat.num_blocks
        self._seats[handle] = seat
        is_short = spec.num_tokens <= self.info.max_local_prefill_tokens
        if source is KvSource.HERE or (is_short and source is KvSource.PREFILL_WORKER):
            self._tell(handle, PrefillsHere(0))
            if spec.sampling.prompt_logprobs >= 0:
                self._tell(handle, PromptScored(prompt_logprobs_of(spec)))
            self._run(seat, ())
        else:
            self._tell(handle, Offered(f"{self._address}/{handle}".encode(), 0))
        self._report()

    def _run(self, seat: _Seat, samples: Sequence[Sample]) -> None:
        """The KV is there, and the first tokens unless they are computed here: the choices part."""
        if seat.spec.sampling.beam:
            seat.is_running = True
        else:
            self._part(seat, samples)
        self._start_steps()

    def _part(self, group: _Seat, samples: Sequence[Sample]) -> None:
        del self._seats[group.handle]
        first = min(group.choices)
        for number in sorted(group.choices):
            seat = _Seat(
                group.handle + number,
                group.spec.choice_alone(number),
                {0},
                group.num_blocks if number == first else 0,
                0 if number == first else group.num_blocks - 1,
                is_running=True,
            )
            self._seats[seat.handle] = seat
            if samples:
                sample = samples[number]
                index = len(seat.spec.output_token_ids)
                seat.token_ids.append(sample.token_id)
                finish = self._finish_of(seat)
                event = Tokens(index, (sample,), finish)
                if finish is FinishReason.NONE:
                    self._tell(seat.handle, event)
                else:
                    self._leave(seat, event)

    def _start_steps(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self.step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        for seat in sorted(self._seats.values(), key=lambda s: s.spec.rank):
            if seat.handle in self._seats and seat.is_running and not seat.is_paused:
                self._produce(seat)
        self._report()
        if any(seat.is_running and not seat.is_paused for seat in self._seats.values()):
            self._start_steps()

    def _produce(self, seat: _Seat) -> None:
        if seat.spec.sampling.beam:
            self._search(seat)
            return
        samples: list[Sample] = []
        index = len(seat.spec.output_token_ids) + len(seat.token_ids)
        finish = FinishReason.NONE
        while len(samples) < self.tokens_per_step and finish is FinishReason.NONE:
            token_ids = [*seat.spec.token_ids, *seat.token_ids]
            if not self._grow(seat, len(token_ids) + 1):
                break
            samples.append(next_sample(seat.spec, token_ids))
            seat.token_ids.append(samples[-1].token_id)
            finish = self._finish_of(seat)
        num_drafts = len(samples) - 1
        event = Tokens(index, tuple(samples), finish, 2 * num_drafts, num_drafts)
        if finish is not FinishReason.NONE:
            self._leave(seat, event)
        elif samples:
            self._tell(seat.handle, event)

    def _search(self, seat: _Seat) -> None:
        """One step of a search, which takes as many as its longest output has tokens."""
        outputs = expected_outputs(seat.spec)
        seat.token_ids.append(0)
        if not self._grow(seat, seat.spec.num_tokens + len(seat.token_ids)):
            return
        if len(seat.token_ids) < max(map(len, outputs)):
            return
        self._free(seat)
        found = zip(outputs, scores_of(seat.spec), strict=True)
        for handle, (output, score) in enumerate(found, start=seat.handle):
            samples = tuple(map(Sample, output))
            self._tell(handle, Tokens(0, samples, FinishReason.LENGTH, score=score))

    def _finish_of(self, seat: _Seat) -> FinishReason:
        num_output_tokens = len(seat.spec.output_token_ids) + len(seat.token_ids)
        num_tokens = seat.spec.num_tokens + len(seat.token_ids)
        sampling = seat.spec.sampling
        token_id = seat.token_ids[-1]
        return finish_reason(
            token_id, num_output_tokens, num_tokens, sampling, self.info.max_model_len
        )

    def _grow(self, seat: _Seat, num_tokens: int) -> bool:
        """Get a block for a sequence that needs one, from the worst-ranked one if there is none."""
        num_needed = self.info.layout.num_blocks_for(num_tokens) - seat.num_shared_blocks
        while num_needed > seat.num_blocks:
            if self._num_free:
                self._num_free -= 1
                seat.num_blocks += 1
                continue
            worst = max(self._seats.values(), key=lambda s: s.spec.rank)
            self.num_preemptions += 1
            self._leave(worst, Preempted())
            if worst is seat:
                return False
        return True

    def _leave(self, seat: _Seat, event: DecodeEvent) -> None:
        if seat.handle in self._seats:
            self._tell(seat.handle, event)
            self._free(seat)

    def _free(self, seat: _Seat) -> None:
        del self._seats[seat.handle]
        self._num_free += seat.num_blocks
        self._report()

    def _draw_latency(self) -> float:
        return self.latency()

    def _tell(self, handle: int, event: DecodeEvent) -> None:
        self.links[-1].tell(handle, event)

    def _report(self) -> None:
        self._loop.call_later(0.001, self._report_now)

    def _report_now(self) -> None:
        if not self._is_up:
            return
        num_running = sum(seat.is_running for seat in self._seats.values())
        self._fleet.report(
            self._address,
            WorkerLoad(
                num_running=num_running,
                num_waiting=len(self._seats) - num_running,
                blocks=BlockCounts(self._num_free, 0, self.info.num_blocks - self._num_free),
                is_draining=self.is_draining,
            ),
        )


class FakePrefill:
    """A prefill worker and its link in one: one prompt after the other, a token a `token_s`."""

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
        self.num_prefills = 0
        self.num_in_flight = 0
        self.max_pending_tokens = 0
        self.answer_delay_s = 0.0
        self.finish_early = False
        self._fleet = fleet
        self._address = address
        self._decodes = decodes
        self._token_s = token_s
        self._commit_delay_s = commit_delay_s
        self._loop = asyncio.get_running_loop()
        self._engine = asyncio.Lock()
        self._pending_tokens = 0
        self._down: asyncio.Future[None] = self._loop.create_future()
        self.come_up()

    def come_up(self) -> None:
        self._down = self._loop.create_future()
        self._fleet.join_prefill(self._address, self.info, self)
        self._fleet.report(self._address, WorkerLoad())

    def go_down(self, *, is_noticed: bool = True) -> None:
        if is_noticed:
            self._fleet.leave(self._address, WorkerState.UNREACHABLE, "killed by the test")
        self._down.set_result(None)

    async def prefill(
        self, spec: SequenceSpec, ticket: bytes, timeout_s: float, on_first: OnFirst
    ) -> None:
        self.num_prefills += 1
        self.num_in_flight += 1
        self._pending_tokens += spec.num_tokens
        self.max_pending_tokens = max(self.max_pending_tokens, self._pending_tokens)
        work = self._loop.create_task(self._work(spec, ticket, timeout_s))
        try:
            await asyncio.wait((work, self._down), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise WorkerLost("the prefill worker was killed by the test")
            on_first(work.result())
        finally:
            work.cancel()
            self.num_in_flight -= 1
            self._pending_tokens -= spec.num_tokens

    async def _work(self, spec: SequenceSpec, ticket: bytes, timeout_s: float) -> PrefillResult:
        asked_s = self._loop.time()
        async with asyncio.timeout(timeout_s), self._engine:
            started_s = self._loop.time()
            await asyncio.sleep(self._token_s * spec.num_tokens)
        firsts = self._firsts(spec)
        goes_on = any(first.finish is FinishReason.NONE for first in firsts)
        if ticket and goes_on:
            samples = tuple(first.sample for first in firsts)
            for decode in self._decodes:
                self._loop.call_later(self._commit_delay_s, decode.commit, ticket, samples)
        if self.answer_delay_s:
            await asyncio.sleep(self.answer_delay_s)
        now_s = self._loop.time()
        return PrefillResult(
            firsts,
            0,
            (started_s - asked_s) * 1e3,
            (now_s - started_s) * 1e3,
            prompt_logprobs_of(spec),
        )

    def _firsts(self, spec: SequenceSpec) -> tuple[First, ...]:
        if spec.sampling.beam:
            return (First(next_sample(spec, spec.token_ids)),)
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
            firsts.append(First(sample, FinishReason.STOP if self.finish_early else finish))
        return tuple(firsts)


def with_block_size(layout: KvLayout, block_size: int) -> KvLayout:
    return replace(layout, block_size=block_size)
