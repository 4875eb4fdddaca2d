"""The workers as the gateway knows them: what they report, and what the gateway has in flight on
them.

All in one event loop. Connections (workers.py) write what workers report; placements write what is
in flight; the dispatcher reads snapshots. Listeners are called at each change that may make room.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from baton.errors import PeerMismatch
from baton.types import PROTOCOL_VERSION, Tier, WorkerInfo, WorkerLoad
from gateway.links.worker_link import WorkerLink
from gateway.routing.history import BrokenPairs, RecentWork
from gateway.routing.numerics import NumericsPolicy, NumericsWatch, Rounding
from gateway.routing.router import DecodeView, PrefillView

_log = logging.getLogger(__name__)

#: A prefill worker's own queue is kept this many batches short, but for what its cache saves.
_PREFILL_QUEUE_BATCHES = 2

_NONE: Mapping[str, int] = MappingProxyType({})


class WorkerState(enum.Enum):
    """As `WorkerStatus.state` in inference.proto."""

    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"


class Worker:
    """One address. `info` stays for display after the worker is gone."""

    def __init__(self, address: str, tier: Tier) -> None:
        self.address = address
        self.listed_tier = tier
        """Under which it is to be found, and was started."""
        self.tier = tier
        """That it serves now, by its last report."""
        self.state = WorkerState.UNREACHABLE
        self.reason = "not reached yet"
        self.info: WorkerInfo | None = None
        self.name = ""
        """As it calls itself; empty before it was reached."""
        self.load = WorkerLoad()
        self.link: WorkerLink | None = None
        """That of the connection that stands, or stood last."""
        self.is_joined = False
        """Whether it was accepted and its connection stands."""
        self.num_in_flight = 0
        self.num_homed = 0
        """Sequences that run here, or will, beyond their first tokens."""
        self.outstanding_tokens = 0
        """Prompt tokens that this gateway has given it to compute."""
        self._other_tokens = 0
        """Those that it had beside them at its last report: from other gateways, or more than was
        thought."""
        self.is_awaiting_report = False
        """After a refusal: what we believe about it is wrong until it reports again."""
        self.unreported_blocks: dict[int, int] = {}
        """By placement: blocks reserved here that its last report does not show yet."""
        self.settled: set[int] = set()
        """Placements whose blocks the worker has taken: its next report shows them."""

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def is_known(self) -> bool:
        """Whether it was accepted and not refused since: a worker that may come back."""
        return self.info is not None and self.state is not WorkerState.REFUSED

    def join(self, info: WorkerInfo, link: WorkerLink) -> None:
        """Its connection stands, and it was accepted."""
        self.info, self.link = info, link
        self.name = info.identity.worker_id
        self.is_joined = True
        self.reason = "no load report yet"

    def report(self, load: WorkerLoad) -> None:
        """Take a load report."""
        self.load = load
        self.is_awaiting_report = False
        self._other_tokens = max(0, load.num_pending_tokens - self.outstanding_tokens)
        for placement_id in self.settled:
            self.unreported_blocks.pop(placement_id, None)
        self.settled.clear()

    def prefill_view(self, matched: Mapping[str, int], work: RecentWork) -> PrefillView:
        """matched: by address, leading tokens that a worker probably has."""
        info = self._known_info()
        return PrefillView(
            address=self.address,
            max_model_len=info.max_model_len,
            outstanding_tokens=self.outstanding_tokens + self._other_tokens,
            max_outstanding_tokens=_PREFILL_QUEUE_BATCHES * info.max_num_batched_tokens,
            matched_tokens=matched.get(self.address, 0),
            ahead_tokens=work.ahead(self.address),
            batch_tokens=info.max_num_batched_tokens,
            prefill_tokens_per_s=self.load.prefill_tokens_per_s,
            is_awaiting_report=self.is_awaiting_report,
        )

    def decode_view(
        self, matched: Mapping[str, int] = _NONE, unreached_by: Set[str] = frozenset()
    ) -> DecodeView:
        """matched: as of prefill_view."""
        info, load = self._known_info(), self.load
        num_reported = load.num_running + load.num_waiting + len(self.unreported_blocks)
        return DecodeView(
            address=self.address,
            max_model_len=info.max_model_len,
            max_local_prefill_tokens=load.local_prefill_threshold,
            layout=info.layout,
            num_blocks=info.num_blocks,
            num_available_blocks=load.blocks.available - sum(self.unreported_blocks.values()),
            num_sequences=max(self.num_in_flight, num_reported),
            max_num_seqs=info.max_num_seqs,
            is_awaiting_report=self.is_awaiting_report,
            matched_tokens=matched.get(self.address, 0),
            unreached_by=unreached_by,
            max_shared_tokens=info.max_local_prefill_tokens,
            pending_tokens=self.outstanding_tokens + self._other_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
        )

    def _known_info(self) -> WorkerInfo:
        if self.info is None:
            raise ValueError(f"{self.address} has not said who it is")
        return self.info


class Fleet:
    """All workers, by address."""

    def __init__(
        self,
        prefill_addresses: Iterable[str] = (),
        decode_addresses: Iterable[str] = (),
        *,
        numerics_policy: NumericsPolicy = "mixed",
    ) -> None:
        self._workers: dict[str, Worker] = {}
        self.workers: Mapping[str, Worker] = MappingProxyType(self._workers)
        self._ready: dict[Tier, tuple[Worker, ...] | None] = dict.fromkeys(Tier)
        """Who is ready, by tier; None until it is asked for again after a change."""
        self._known: dict[Tier, tuple[WorkerInfo, ...] | None] = dict.fromkeys(Tier)
        """The same of who is known."""
        self.prefill_work = RecentWork()
        """Of the prefill workers that are ready. Written by placements."""
        self.broken_pairs = BrokenPairs()
        """Of workers that are here. Written by placements."""
        self.numerics = NumericsWatch(numerics_policy)
        """Of workers that have joined."""
        for address in prefill_addresses:
            self._workers[address] = Worker(address, Tier.PREFILL)
        for address in decode_addresses:
            self._workers[address] = Worker(address, Tier.DECODE)
        self._listeners: list[Callable[[], None]] = []
        self._leave_listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each change that may make room, or take a worker away."""
        self._listeners.append(listener)

    def listen_leave(self, listener: Callable[[str], None]) -> None:
        """Have `listener` called with the address of a worker that was lost: its cache is not what
        it was."""
        self._leave_listeners.append(listener)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    def tier(self, tier: Tier) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.tier is tier]

    def ready(self, tier: Tier) -> Sequence[Worker]:
        """Workers of the tier that take work."""
        ready = self._ready[tier]
        if ready is None:
            ready = tuple(w for w in self.workers.values() if w.tier is tier and w.is_ready)
            self._ready[tier] = ready
        return ready

    def barred_from(self, receiver: str) -> Set[str]:
        """Addresses of workers whose KV does not get to the worker at `receiver`, or must not."""
        resting, strangers = (
            self.broken_pairs.barred_from(receiver),
            self.numerics.strangers_of(receiver),
        )
        return resting | strangers if strangers else resting

    def known(self, tier: Tier) -> tuple[WorkerInfo, ...]:
        """What the known workers of the tier reported. The same object as long as nothing of it
        changes."""
        known = self._known[tier]
        if known is None:
            known = tuple(w.info for w in self.tier(tier) if w.info and w.is_known)
            self._known[tier] = known
        return known

    def add(self, address: str, tier: Tier) -> Worker:
        """A worker is to be found at `address`, which no other worker has. It is used once it has
        joined."""
        if address in self._workers:
            raise ValueError(f"{address} is in the fleet already")
        worker = self._workers[address] = Worker(address, tier)
        self.changed()
        return worker

    def remove(self, address: str) -> None:
        """Nobody is to be found at `address` any more. What is placed there keeps its claim until
        it is released."""
        self.leave(address, WorkerState.UNREACHABLE, "listed no more")
        self._known[self._workers.pop(address).tier] = None
        self.changed()

    def join(self, address: str, info: WorkerInfo, link: WorkerLink) -> None:
        """Take a worker that was reached. It is used from its first load report on.

        Raises PeerMismatch if it cannot work with this gateway or with the workers that are here;
        it is refused then.
        """
        worker = self.workers[address]
        try:
            self._check(worker, info)
        except PeerMismatch as error:
            self.leave(address, WorkerState.REFUSED, error.message)
            raise
        worker.join(info, link)
        self._known[worker.tier] = None
        self._update_numerics()

    def report(self, address: str, load: WorkerLoad) -> None:
        """Take a joined worker's load."""
        worker = self.workers[address]
        worker.report(load)
        self._set_tier(worker, load.role or worker.listed_tier)
        if load.is_draining:
            self._set_state(worker, WorkerState.DRAINING, "draining: finishes what it has")
        elif (refusal := self.numerics.refusal_of(address)) is not None:
            if worker.state is not WorkerState.REFUSED:
                _log.warning("worker at %s is refused: %s", address, refusal.message)
            self._set_state(worker, WorkerState.REFUSED, refusal.message)
        else:
            self._set_state(worker, WorkerState.READY, "")
        self.changed()

    def leave(self, address: str, state: WorkerState, reason: str) -> None:
        """The worker takes no more work: lost, stalled or refused."""
        worker = self.workers[address]
        was_joined, worker.is_joined = worker.is_joined, False
        self._update_numerics()
        self._set_state(worker, state, reason)
        self._set_tier(worker, worker.listed_tier)
        worker.load = WorkerLoad()
        self.broken_pairs.drop(address)
        if was_joined:
            for listener in self._leave_listeners:
                listener(address)
        self.changed()

    def _set_state(self, worker: Worker, state: WorkerState, reason: str) -> None:
        is_ready = state is WorkerState.READY
        if worker.state is not state:
            self._known[worker.tier] = None
        if worker.is_ready != is_ready:
            self._ready[worker.tier] = None
            if worker.tier is Tier.PREFILL:
                (self.prefill_work.add if is_ready else self.prefill_work.drop)(worker.address)
        worker.state, worker.reason = state, reason

    def _set_tier(self, worker: Worker, tier: Tier) -> None:
        """It serves this tier from now on; what is placed on it stays."""
        if worker.tier is tier:
            return
        if worker.is_ready:
            is_prefill = tier is Tier.PREFILL
            (self.prefill_work.add if is_prefill else self.prefill_work.drop)(worker.address)
        worker.tier = tier
        self._ready = dict.fromkeys(Tier)
        self._known = dict.fromkeys(Tier)
        self._update_numerics()

    def _update_numerics(self) -> None:
        self.numerics.update(
            {
                worker.address: Rounding(
                    worker.info.identity.worker_id, worker.tier, worker.info.numerics
                )
                for worker in self.workers.values()
                if worker.is_joined and worker.info
            }
        )

    def _check(self, worker: Worker, info: WorkerInfo) -> None:
        peer = f"{info.identity.worker_id} at {worker.address}"
        if not info.min_protocol_version <= PROTOCOL_VERSION <= info.max_protocol_version:
            theirs = f"{info.min_protocol_version}..{info.max_protocol_version}"
            raise PeerMismatch.of(peer, "protocol_version", str(PROTOCOL_VERSION), theirs)
        if info.tier is not worker.listed_tier:
            raise PeerMismatch.of(peer, "tier", worker.listed_tier.name, info.tier.name)
        for other in self.workers.values():
            if other is worker or not other.is_joined or other.info is None:
                continue
            if difference := other.info.layout.difference(info.layout):
                raise PeerMismatch.of(peer, *difference)
            for name in ("model", "vocab_size"):
                expected, actual = getattr(other.info, name), getattr(info, name)
                if expected != actual:
                    raise PeerMismatch.of(peer, name, str(expected), str(actual))
            if other.info.identity.worker_id == info.identity.worker_id:
                raise PeerMismatch.of(peer, "worker_id", "a name of its own", other.address)
