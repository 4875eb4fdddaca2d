"""The gateway's view of its workers: their reports, and the work that this gateway has in flight on
them.

Owned by one event loop. Connections (workers.py) write reports, placements write work in flight,
the dispatcher reads snapshots. Listeners are called at each change that may make room.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from baton.errors import PeerMismatch
from baton.types import NO_SLO, PROTOCOL_VERSION, Slo, Tier, WorkerInfo, WorkerLoad
from gateway.links.worker_link import WorkerLink
from gateway.routing.history import BrokenPairs, RecentWork
from gateway.routing.numerics import NumericsPolicy, NumericsWatch, Rounding
from gateway.routing.router import DecodeView, PrefillView
from gateway.routing.ways import QUEUE_SHARE, TTFT_SHARE

_log = logging.getLogger(__name__)

#: Batches of prompt tokens queued at a prefill worker before it counts as full; cached prefixes
#: extend the limit.
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
    """One worker address. `info` is kept for display after the worker has left."""

    def __init__(self, address: str, tier: Tier) -> None:
        self.address = address
        self.listed_tier = tier
        """Tier under which the registry lists it, and in which it started."""
        self.tier = tier
        """Tier that it serves now, from its last report."""
        self.state = WorkerState.UNREACHABLE
        self.reason = "not reached yet"
        self.info: WorkerInfo | None = None
        self.name = ""
        """Worker id that it reports; empty before the first connection."""
        self.load = WorkerLoad()
        self.link: WorkerLink | None = None
        """Link of the current connection, or of the last one."""
        self.is_joined = False
        """Whether it was accepted and its connection is open."""
        self.num_in_flight = 0
        self.num_homed = 0
        """Sequences running here, or placed here to run, beyond their first tokens."""
        self.outstanding_tokens = 0
        """Prompt tokens that this gateway has placed here, not computed yet."""
        self._other_tokens = 0
        """Pending prompt tokens in its last report beyond those of this gateway: work of other
        gateways, or prefix cache misses."""
        self.is_awaiting_report = False
        """Set after a refusal: the stored load is stale until the next report."""
        self.unreported_blocks: dict[int, int] = {}
        """Blocks reserved here that its last report does not include yet, by placement."""
        self.settled: set[int] = set()
        """Placements with reserved blocks; the next report includes them."""

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def is_known(self) -> bool:
        """Whether it was accepted and not refused since, and may come back."""
        return self.info is not None and self.state is not WorkerState.REFUSED

    @property
    def num_sequences(self) -> int:
        """Sequences that it has, as far as its last report and this gateway know."""
        num_reported = self.load.num_running + self.load.num_waiting + len(self.unreported_blocks)
        return max(self.num_in_flight, num_reported)

    @property
    def max_num_seqs(self) -> int:
        return self._known_info().max_num_seqs

    @property
    def num_free(self) -> int:
        """Sequences that it may take besides."""
        return max(0, self.max_num_seqs - self.num_sequences)

    def join(self, info: WorkerInfo, link: WorkerLink) -> None:
        """Record an accepted connection."""
        self.info, self.link = info, link
        self.name = info.identity.worker_id
        self.is_joined = True
        self.reason = "no load report yet"

    def report(self, load: WorkerLoad) -> None:
        """Store a load report."""
        self.load = load
        self.is_awaiting_report = False
        self._other_tokens = max(0, load.num_pending_tokens - self.outstanding_tokens)
        for placement_id in self.settled:
            self.unreported_blocks.pop(placement_id, None)
        self.settled.clear()

    def prefill_view(
        self, matched: Mapping[str, int], work: RecentWork, slo: Slo = NO_SLO
    ) -> PrefillView:
        """matched: leading tokens probably cached, by worker address."""
        info = self._known_info()
        most = _PREFILL_QUEUE_BATCHES * info.max_num_batched_tokens
        return PrefillView(
            address=self.address,
            max_model_len=info.max_model_len,
            outstanding_tokens=self.outstanding_tokens + self._other_tokens,
            max_outstanding_tokens=min(most, self._max_queued_tokens(slo)),
            matched_tokens=matched.get(self.address, 0),
            ahead_tokens=work.ahead(self.address),
            batch_tokens=info.max_num_batched_tokens,
            prefill_tokens_per_s=self.load.prefill_tokens_per_s,
            is_awaiting_report=self.is_awaiting_report,
        )

    def decode_view(
        self,
        matched: Mapping[str, int] = _NONE,
        unreached_by: Set[str] = frozenset(),
        slo: Slo = NO_SLO,
    ) -> DecodeView:
        """matched: leading tokens probably cached, by worker address."""
        info, load = self._known_info(), self.load
        return DecodeView(
            address=self.address,
            max_model_len=info.max_model_len,
            max_local_prefill_tokens=load.local_prefill_threshold,
            layout=info.layout,
            num_blocks=info.num_blocks,
            num_available_blocks=load.blocks.available - sum(self.unreported_blocks.values()),
            num_sequences=self.num_sequences,
            max_num_seqs=info.max_num_seqs,
            is_awaiting_report=self.is_awaiting_report,
            matched_tokens=matched.get(self.address, 0),
            unreached_by=unreached_by,
            max_shared_tokens=max(load.local_prefill_threshold, info.max_local_prefill_tokens),
            is_colocated=load.is_colocated,
            pending_tokens=self.outstanding_tokens + self._other_tokens,
            max_pending_tokens=self._max_queued_tokens(slo),
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            num_host_blocks=load.num_host_blocks,
            sequence_s=load.costs.sequence_s,
        )

    def _max_queued_tokens(self, slo: Slo) -> float:
        speed = self.load.prefill_tokens_per_s
        return QUEUE_SHARE * slo.ttft_s * speed if slo.ttft_s is not None and speed else math.inf

    def _known_info(self) -> WorkerInfo:
        if self.info is None:
            raise ValueError(f"{self.address} has not said who it is")
        return self.info


class Fleet:
    """All workers by address."""

    def __init__(
        self,
        prefill_addresses: Iterable[str] = (),
        decode_addresses: Iterable[str] = (),
        *,
        numerics_policy: NumericsPolicy = "mixed",
        slo: Slo = NO_SLO,
    ) -> None:
        self.slo = slo
        self._workers: dict[str, Worker] = {}
        self.workers: Mapping[str, Worker] = MappingProxyType(self._workers)
        self._ready: dict[Tier, tuple[Worker, ...] | None] = dict.fromkeys(Tier)
        """Ready workers, by tier; None means recompute on the next read."""
        self._known: dict[Tier, tuple[WorkerInfo, ...] | None] = dict.fromkeys(Tier)
        """Infos of known workers, by tier; None means recompute."""
        self.prefill_work = RecentWork()
        """Recent prompt tokens of the ready prefill workers. Written by placements."""
        self.broken_pairs = BrokenPairs()
        """Pairs of present workers that failed to transfer KV. Written by placements."""
        self.numerics = NumericsWatch(numerics_policy)
        """Numerics classes of joined workers."""
        self._joined: dict[str, Worker] = {}
        """Joined workers, by their names. Each is compatible with each."""
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
        """Have `listener` called with the address of each lost worker, because its prefix cache may
        be gone."""
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

    def has_ready(self, tier: Tier) -> bool:
        """Whether a worker of the tier takes work. Asked at each change, so it collects none."""
        ready = self._ready[tier]
        if ready is None:
            return any(w.tier is tier and w.is_ready for w in self.workers.values())
        return bool(ready)

    @property
    def has_split(self) -> bool:
        """Whether a ready decode worker may be sent KV. If all are colocated, prefill workers
        rest."""
        ready = self.ready(Tier.DECODE)
        return not ready or not all(worker.load.is_colocated for worker in ready)

    def spare_ttft_s(self, num_tokens: int, slo: Slo) -> float:
        """Seconds that a prompt may wait before its first token misses the target; infinite without
        a target."""
        if slo.ttft_s is None:
            return math.inf
        ready = (*self.ready(Tier.PREFILL), *self.ready(Tier.DECODE))
        speed = max((worker.load.prefill_tokens_per_s for worker in ready), default=0)
        return TTFT_SHARE * slo.ttft_s - (num_tokens / speed if speed else 0.0)

    def barred_from(self, receiver: str) -> Set[str]:
        """Addresses of workers that cannot, or must not, send KV to `receiver`."""
        resting, incompatible = (
            self.broken_pairs.barred_from(receiver),
            self.numerics.incompatible_with(receiver),
        )
        return resting | incompatible if incompatible else resting

    def known(self, tier: Tier) -> tuple[WorkerInfo, ...]:
        """Infos of the tier's known workers. The same tuple is returned until one of them
        changes."""
        known = self._known[tier]
        if known is None:
            known = tuple(w.info for w in self.tier(tier) if w.info and w.is_known)
            self._known[tier] = known
        return known

    def add(self, address: str, tier: Tier) -> Worker:
        """Add a worker at a new address. It gets work once it has joined. Raises ValueError for an
        address of the fleet."""
        if address in self._workers:
            raise ValueError(f"{address} is in the fleet already")
        worker = self._workers[address] = Worker(address, tier)
        self.changed()
        return worker

    def remove(self, address: str) -> None:
        """Remove an address. Placements on it keep their claims until they are released."""
        self.leave(address, WorkerState.UNREACHABLE, "listed no more")
        self._known[self._workers.pop(address).tier] = None
        self.changed()

    def join(self, address: str, info: WorkerInfo, link: WorkerLink) -> None:
        """Accept a connected worker. It gets work from its first load report on.

        Raises PeerMismatch, and marks the worker refused, if it is incompatible with this gateway
        or with joined workers.
        """
        worker = self.workers[address]
        try:
            self._check(worker, info)
        except PeerMismatch as error:
            self.leave(address, WorkerState.REFUSED, error.message)
            raise
        self._forget_join(worker)
        worker.join(info, link)
        self._joined[worker.name] = worker
        self._known[worker.tier] = None
        self._update_numerics(worker)

    def report(self, address: str, load: WorkerLoad) -> None:
        """Store the load of a joined worker, and update its tier and state."""
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
        """Stop placing work on a worker that is lost, stalled or refused."""
        worker = self.workers[address]
        was_joined = worker.is_joined
        self._forget_join(worker)
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
        """Move the worker to this tier; its placements stay."""
        if worker.tier is tier:
            return
        if worker.is_ready:
            is_prefill = tier is Tier.PREFILL
            (self.prefill_work.add if is_prefill else self.prefill_work.drop)(worker.address)
        worker.tier = tier
        self._ready = dict.fromkeys(Tier)
        self._known = dict.fromkeys(Tier)
        self._update_numerics(worker)

    def _forget_join(self, worker: Worker) -> None:
        if worker.is_joined:
            worker.is_joined = False
            del self._joined[worker.name]
            self.numerics.drop(worker.address)

    def _update_numerics(self, worker: Worker) -> None:
        if worker.is_joined and worker.info:
            rounding = Rounding(worker.name, worker.tier, worker.info.numerics)
            self.numerics.put(worker.address, rounding)

    def _check(self, worker: Worker, info: WorkerInfo) -> None:
        peer = f"{info.identity.worker_id} at {worker.address}"
        if not info.min_protocol_version <= PROTOCOL_VERSION <= info.max_protocol_version:
            theirs = f"{info.min_protocol_version}..{info.max_protocol_version}"
            raise PeerMismatch.of(peer, "protocol_version", str(PROTOCOL_VERSION), theirs)
        if info.tier is not worker.listed_tier:
            raise PeerMismatch.of(peer, "tier", worker.listed_tier.name, info.tier.name)
        namesake = self._joined.get(info.identity.worker_id)
        if namesake is not None and namesake is not worker:
            raise PeerMismatch.of(peer, "worker_id", "a name of its own", namesake.address)
        other = next((each for each in self._joined.values() if each is not worker), None)
        if other is None or other.info is None:
            return
        if difference := other.info.layout.difference(info.layout):
            raise PeerMismatch.of(peer, *difference)
        for field in ("model", "vocab_size"):
            expected, actual = getattr(other.info, field), getattr(info, field)
            if expected != actual:
                raise PeerMismatch.of(peer, field, str(expected), str(actual))
