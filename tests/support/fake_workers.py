"""Workers without engines, for tests of the gateway under a virtual clock.

They keep the promises of baton.events: blocks are counted, tokens come by steps, memory that runs out preempts the
worst-ranked sequence. The next token is a function of the tokens before it, so that whatever is lost, doubled or out of
order changes the output. Faults are methods, called by the test at the moment it wants.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.errors import WorkerLost
from baton.events import (
    Committed,
    DecodeEvent,
    Deferred,
    Failed,
    Offered,
    Preempted,
    PrefillsHere,
    Tokens,
)
from baton.types import (
    BlockCounts,
    FinishReason,
    KvLayout,
    Sample,
    SequenceSpec,
    Tier,
    WorkerIdentity,
    WorkerInfo,
    WorkerLoad,
    finish_reason,
)
from gateway.fleet import Fleet, WorkerState
from gateway.links import PrefillResult, Sink

VOCAB_SIZE = 97
LAYOUT = KvLayout("f00d", 2, 1, 4, "float32", 4)


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """The token after `token_ids`: any change of them changes it."""
    data = repr((tuple(token_ids), seed)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") % VOCAB_SIZE


def expected_output(spec: SequenceSpec, max_model_len: int = 1 << 30) -> list[int]:
    """All tokens that `spec` comes to, stop strings apart."""
    token_ids = list(spec.token_ids)
    output = list(spec.output_token_ids)
    while True:
        output.append(next_token(token_ids, spec.sampling.seed))
        token_ids.append(output[-1])
        if finish_reason(output[-1], len(output), len(token_ids), spec.sampling, max_model_len):
            return output


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
    )


@dataclass(slots=True, eq=False)
class _Seat:
    """A sequence on a fake decode worker."""

    handle: int
    spec: SequenceSpec
    sink: Sink
    num_blocks: int
    is_running: bool = False
    token_ids: list[int] = field(default_factory=list)


class FakeDecode:
    """A decode worker and its link in one."""

    def __init__(
        self, fleet: Fleet, address: str, info: WorkerInfo, *, step_s: float = 0.01
    ) -> None:
        self.info = info
        self.step_s = step_s
        self.num_opens = 0
        self.specs: list[SequenceSpec] = []
        """All that were ever opened here, in order."""
        self.num_deferrals = 0
        self.num_preemptions = 0
        self.tokens_per_step = 1
        self._fleet = fleet
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._seats: dict[int, _Seat] = {}
        self._num_free = info.num_blocks
        self._timer: asyncio.TimerHandle | None = None
        self._aborted: set[int] = set()
        self._is_up = False
        self.is_mute = False
        """Whether openings get no answer."""
        self.come_up()

    @property
    def num_sequences(self) -> int:
        return len(self._seats)

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    # The link.

    def open(self, spec: SequenceSpec, prefill_here: bool, sink: Sink) -> int:
        self.num_opens += 1
        self.specs.append(spec)
        handle = self.num_opens
        self._loop.call_soon(self._admit, handle, spec, prefill_here, sink)
        return handle

    def abort(self, handle: int) -> None:
        self._aborted.add(handle)
        seat = self._seats.pop(handle, None)
        if seat:
            self._num_free += seat.num_blocks
            self._report()

    # What the test does to it.

    def come_up(self) -> None:
        self._is_up = True
        self._fleet.join_decode(self._address, self.info, self)
        self._report()

    def go_down(self) -> None:
        """As a killed worker: all is lost, and the gateway is told by the connection."""
        self._is_up = False
        self._fleet.leave(self._address, WorkerState.UNREACHABLE, "killed by the test")
        seats, self._seats = list(self._seats.values()), {}
        self._num_free = self.info.num_blocks
        for seat in seats:
            self._tell(seat.sink, Failed("WORKER_LOST", "killed by the test", True))

    def fail(self, reason: str, *, is_retriable: bool) -> None:
        """Fail every sequence that is here."""
        for seat in list(self._seats.values()):
            self._leave(seat, Failed(reason, "failed by the test", is_retriable))

    def preempt_all(self) -> None:
        for seat in list(self._seats.values()):
            self._leave(seat, Preempted())

    def tell_all(self, event: DecodeEvent) -> None:
        """Send something that this worker would not send by itself."""
        for seat in self._seats.values():
            self._tell(seat.sink, event)

    def commit(self, ticket: bytes, sample: Sample) -> None:
        """A prefill worker's KV has arrived whole."""
        address, _, handle = ticket.decode().rpartition("/")
        seat = self._seats.get(int(handle))
        if seat is None or address != self._address:
            return
        seat.token_ids.append(sample.token_id)
        seat.is_running = True
        self._tell(seat.sink, Committed(1.0, 100))
        self._start_steps()

    # Inside.

    def _admit(self, handle: int, spec: SequenceSpec, prefill_here: bool, sink: Sink) -> None:
        if handle in self._aborted or self.is_mute:
            return
        if not self._is_up:
            self._tell(sink, Failed("WORKER_LOST", "it is down", True))
            return
        num_blocks = self.info.layout.num_blocks_for(spec.num_tokens + 1)
        if num_blocks > self._num_free or len(self._seats) >= self.info.max_num_seqs:
            self.num_deferrals += 1
            self._tell(sink, Deferred("no room"))
            self._report()
            return
        self._num_free -= num_blocks
        seat = _Seat(handle, spec, sink, num_blocks)
        self._seats[handle] = seat
        if prefill_here or spec.num_tokens <= self.info.max_local_prefill_tokens:
            seat.is_running = True
            self._tell(sink, PrefillsHere(0))
            self._start_steps()
        else:
            self._tell(sink, Offered(f"{self._address}/{handle}".encode(), 0))
        self._report()

    def _start_steps(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self.step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        for seat in sorted(self._seats.values(), key=lambda s: s.spec.rank):
            if seat.handle in self._seats and seat.is_running:
                self._produce(seat)
        self._report()
        if any(seat.is_running for seat in self._seats.values()):
            self._start_steps()

    def _produce(self, seat: _Seat) -> None:
        samples: list[Sample] = []
        index = len(seat.spec.output_token_ids) + len(seat.token_ids)
        finish = FinishReason.NONE
        while len(samples) < self.tokens_per_step and finish is FinishReason.NONE:
            token_ids = [*seat.spec.token_ids, *seat.token_ids]
            if not self._grow(seat, len(token_ids) + 1):
                break
            token_id = next_token(token_ids, seat.spec.sampling.seed)
            seat.token_ids.append(token_id)
            samples.append(Sample(token_id))
            finish = finish_reason(
                token_id,
                len(seat.spec.output_token_ids) + len(seat.token_ids),
                len(token_ids) + 1,
                seat.spec.sampling,
                self.info.max_model_len,
            )
        event = Tokens(index, tuple(samples), finish)
        if finish is not FinishReason.NONE:
            self._leave(seat, event)
        elif samples:
            self._tell(seat.sink, event)

    def _grow(self, seat: _Seat, num_tokens: int) -> bool:
        """Get a block for a sequence that needs one, from the worst-ranked one if there is none."""
        while self.info.layout.num_blocks_for(num_tokens) > seat.num_blocks:
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
        if self._seats.pop(seat.handle, None) is None:
            return
        self._num_free += seat.num_blocks
        self._tell(seat.sink, event)
        self._report()

    def _tell(self, sink: Sink, event: DecodeEvent) -> None:
        self._loop.call_soon(sink, event)

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

    async def prefill(self, spec: SequenceSpec, ticket: bytes, timeout_s: float) -> PrefillResult:
        self.num_prefills += 1
        self.num_in_flight += 1
        self._pending_tokens += spec.num_tokens
        self.max_pending_tokens = max(self.max_pending_tokens, self._pending_tokens)
        work = self._loop.create_task(self._work(spec, ticket, timeout_s))
        try:
            await asyncio.wait((work, self._down), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise WorkerLost("the prefill worker was killed by the test")
            return work.result()
        finally:
            work.cancel()
            self.num_in_flight -= 1
            self._pending_tokens -= spec.num_tokens

    async def _work(self, spec: SequenceSpec, ticket: bytes, timeout_s: float) -> PrefillResult:
        asked_s = self._loop.time()
        async with asyncio.timeout(timeout_s), self._engine:
            started_s = self._loop.time()
            await asyncio.sleep(self._token_s * spec.num_tokens)
        sample = Sample(next_token(spec.token_ids, spec.sampling.seed))
        finish = finish_reason(
            sample.token_id,
            len(spec.output_token_ids) + 1,
            spec.num_tokens + 1,
            spec.sampling,
            self.info.max_model_len,
        )
        if self.finish_early:
            finish = FinishReason.STOP
        if ticket and finish is FinishReason.NONE:
            for decode in self._decodes:
                self._loop.call_later(self._commit_delay_s, decode.commit, ticket, sample)
        if self.answer_delay_s:
            await asyncio.sleep(self.answer_delay_s)
        now_s = self._loop.time()
        return PrefillResult(
            sample, finish, 0, (started_s - asked_s) * 1e3, (now_s - started_s) * 1e3
        )


def with_block_size(layout: KvLayout, block_size: int) -> KvLayout:
    return replace(layout, block_size=block_size)
