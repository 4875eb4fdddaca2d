"""Two workers, a gateway and the KV channel between them; the caller chooses every step.

All that takes part is the real code: the reducer of requests, both workers' cores, the sender, its
connection, the receiver's sessions, the ticket table, the block pool. In the place of threads,
sockets and clocks stand queues: what is in one may be taken now or later, which is every delay and
every order that threads and networks can bring. `choices` lists what may happen next, by name;
`do` has it happen, and `check` says whether all that must
hold does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

from baton.commands import Abort
from baton.errors import HandoffFailed, NoWorkers, RetriableError
from baton.events import Failed, SequenceEvent, is_last
from baton.types import FinishReason, KvLayout, KvSource, Sampling, SequenceSpec, Tier
from baton.v1 import kv_pb2
from engine.grammar import Matchers
from engine.interface import Batch, EngineSpec, SampleRow, SequenceSlice
from engine.kv.tensors.array import ArrayKvPool
from engine.oracle import (
    FULL_LAYERS,
    OracleEngine,
    OracleLayers,
    OracleOptions,
    oracle_tokens,
)
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions
from gateway.output.output import ChoiceOutput
from gateway.request.assignment import (
    AbortSource,
    Action,
    Assignment,
    Choice,
    Close,
    Deliver,
    Fail,
    Open,
    OpenSource,
    Place,
    SendCommand,
    SetTimer,
    Update,
)
from gateway.request.state import RequestState
from gateway.routing.fleet import Fleet
from gateway.routing.placement import Placement
from gateway.telemetry.timing import Timeline
from kv_transfer import codec
from kv_transfer.frame import Frame, FrameError
from kv_transfer.receiver import Receiver
from kv_transfer.send_connection import SendConnection, Task
from kv_transfer.sender import SendDone
from kv_transfer.ticket import PrefixRequested, TicketCommitted, TicketEvent
from kv_transfer.transport.connection import Staged, TransportError
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.explore import Digest, Found, explore
from tests.support.fake_workers import make_info
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape, SimWorker
from tests.support.stub_link import StubLink
from worker_core import commands as core_commands
from worker_core.admission import CoreLimits
from worker_core.costs import Costs
from worker_core.policy import Policy
from worker_core.state import ledger_of

VOCAB = 1000
#: As large as a block, so that a whole prompt is one that a receiver writes in place.
PROMPT_TOKENS = 4
SAMPLING = Sampling(max_tokens=2)
FAULTS = ("lose", "lose answer", "repeat", "flip", "break", "replay", "kill decode", "kill prefill")


@dataclass(frozen=True)
class Bounds:
    """What is explored: how much may happen in one history.

    faults: which of FAULTS may happen; num_faults: how many of them together. num_ticks: how often
    time may pass to the next deadline while something else could still happen. num_places: how
    often each request may be given workers. layers: of the workers' model.
    """

    num_requests: int = 2
    decode_blocks: int = 4
    prefill_blocks: int = 1
    faults: tuple[str, ...] = ()
    num_faults: int = 0
    num_cancels: int = 0
    num_ticks: int = 0
    num_places: int = 2
    layers: OracleLayers = FULL_LAYERS


class Violation(AssertionError):
    """Something that must never be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Wire:
    """One connection of a sender to a receiver: what is on its way, either way. Implements
    Connection for the sender."""

    def __init__(self, receiver: Receiver, name: str, *, is_logged: bool) -> None:
        """is_logged: what is sent is kept, for somebody to send it again."""
        self.name = name
        self.is_logged = is_logged
        self.sent: deque[tuple[Frame, bytes]] = deque()
        self.answers: deque[Frame] = deque()
        self.log: list[tuple[Frame, bytes]] = []
        self.landing: tuple[memoryview, ...] = ()
        self.lost = ""
        self.is_lost_seen = False
        self.has_aborts = False
        self.session = receiver.session(self._answer, wake=self._wake)

    def _answer(self, frame: Frame) -> None:
        self.answers.append(copied(frame))

    def _wake(self) -> None:
        self.has_aborts = True

    # The sender's end

    def stage(self, num_bytes: int) -> Staged:
        return Staged(0, memoryview(bytearray(num_bytes)))

    def unstage(self, staged: Staged) -> None:
        pass

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        del more
        if self.lost:
            self.is_lost_seen = True
            raise TransportError(self.lost)
        entry = copied(frame), b"".join(map(bytes, staged.payload)) if staged else b""
        self.sent.append(entry)
        if self.is_logged:
            self.log.append(entry)

    def flush(self) -> None:
        pass

    def seal(self, key: bytes) -> None:
        pass

    def receive(self) -> Frame | None:
        if self.answers:
            return self.answers.popleft()
        if self.lost:
            self.is_lost_seen = True
            raise TransportError(self.lost)
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.is_lost_seen = True
        self.lose("the sender is gone")

    # The receiver's end

    def take(self) -> None:
        """The receiver's thread takes what has come: a chunk's header and its payload apart, where
        it is written in place."""
        frame, payload = self.sent[0]
        if self.landing:
            at = 0
            for view in self.landing:
                view[:] = payload[at : at + view.nbytes]
                at += view.nbytes
            payload = b""
        elif isinstance(frame, kv_pb2.KvChunk):
            self.landing = self.session.land(frame)
            if self.landing:
                return
        self.landing = ()
        self.sent.popleft()
        try:
            self.session.on_frame(frame, memoryview(payload))
        except FrameError as error:
            self.lose(error.message)

    def lose(self, why: str) -> None:
        """Lose everything under way; both ends will notice."""
        if self.lost:
            return
        self.lost = why
        self.sent.clear()
        self.landing = ()
        self.session.on_close(why)

    def report_aborts(self) -> None:
        if self.has_aborts and not self.lost:
            self.session.report_aborts()
        self.has_aborts = False


def copied(frame: Frame) -> Frame:
    return type(frame).FromString(frame.SerializeToString())


class Hub(LoopbackHub):
    """Connects senders by wires that the world keeps."""

    def __init__(self, *, is_logged: bool) -> None:
        super().__init__()
        self.wires: list[Wire] = []
        self.is_logged = is_logged

    def connect(self, name: str) -> Wire:  # type: ignore[override]
        with self._lock:
            listener = self._listeners.get(name)
        if listener is None or listener._receiver is None:
            raise TransportError(f"nobody listens at {name}")
        self.wires.append(Wire(listener._receiver, name, is_logged=self.is_logged))
        return self.wires[-1]


class Runner:
    """A sender's thread that runs when the world says so. Implements ConnectionRunner."""

    def __init__(self, connection: SendConnection, name: str) -> None:
        del name
        self.connection = connection
        self.tasks: list[Task] = []
        self.is_over = False

    def submit(self, *tasks: Task) -> bool:
        self.tasks += tasks
        return True

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.is_over = True
        self.connection.close(HandoffFailed("closed"))

    def run(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            self.connection.handle(task)
        while self.connection.pump():
            pass


@dataclass(eq=False)
class Node:
    """A worker, and the gateway's stream to it."""

    name: str
    worker: SimWorker
    commands: deque[core_commands.Command | tuple[int, SequenceSpec, KvSource, bytes]] = field(
        default_factory=deque
    )
    events: deque[tuple[core_commands.StreamEvent, ...]] = field(default_factory=deque)
    runners: list[Runner] = field(default_factory=list)
    sinks: dict[int, tuple[Request, Assignment, int, bool]] = field(default_factory=dict)
    ends: dict[object, int] = field(default_factory=dict)
    """How often each ticket, and each handoff, had its one end."""
    num_handles: int = 0
    is_busy: bool = False


class Request:
    """A client's request at the gateway: the real reducer, and what the driver does for it."""

    def __init__(self, world: World, index: int, num_places: int) -> None:
        self.world = world
        self.name = f"r{index}"
        prompt = tuple(range(index * 100 + 1, index * 100 + 1 + PROMPT_TOKENS))
        self.spec = SequenceSpec(self.name, prompt, SAMPLING, arrival_ns=index)
        self.expected = expected_tokens(prompt, world.bounds.layers)
        output = ChoiceOutput(_DECODING, TextOptions(), 0)
        self.state = RequestState(self.spec, [output], Timeline(0.0))
        self.num_places = num_places
        self.waiting: list[Assignment] = []
        self.opened: dict[tuple[Assignment, bool], tuple[Node, int]] = {}
        self.timers: dict[Assignment, float] = {}
        self.placements: list[Placement] = []
        self.news: dict[Choice, None] = {}
        self.is_delivering = False
        self.tokens: list[int] = []
        self.is_finished = False
        self.is_cancelled = False
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.is_finished or self.is_cancelled or self.error is not None

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._perform(action)
        while self.news and not self.is_delivering:
            self.is_delivering = True
            self._deliver(next(iter(self.news)))
            self.is_delivering = False

    def _perform(self, action: Action) -> None:  # noqa: PLR0912, one arm per action
        match action:
            case Place(assignment):
                self.waiting.append(assignment)
            case Open(assignment, source=source):
                self._open(assignment, self.world.decode, source, b"")
            case OpenSource(assignment, ticket=ticket):
                self._open(assignment, self.world.prefill, KvSource.LOCAL, ticket)
            case SendCommand(assignment, _, Abort()):
                self._abort(assignment, is_source=False)
            case AbortSource(assignment):
                self._abort(assignment, is_source=True)
            case Close(assignment):
                if assignment in self.waiting:
                    self.waiting.remove(assignment)
                self.timers.pop(assignment, None)
                self._abort(assignment, is_source=True)
                self._abort(assignment, is_source=False)
                if assignment.placement:
                    assignment.placement.release()
            case SetTimer(assignment, None):
                self.timers.pop(assignment, None)
            case SetTimer(assignment, float() as delay_s):
                self.timers[assignment] = self.world.now + delay_s
            case Update(placement, outcome):
                placement.record(outcome)
            case Deliver(choice):
                self.news[choice] = None
            case Fail(error):
                require(isinstance(error, RetriableError), f"{self.name} failed: {error!r}")
                self.error = error

    def place(self) -> None:
        assignment = self.waiting.pop(0)
        if not self.num_places:
            self.perform(self.state.on_place(assignment, NoWorkers("no place"), self.world.now))
            return
        self.num_places -= 1
        fleet = self.world.fleet
        workers = fleet.workers
        # Beyond one block the owner computes it: the prefill worker's memory may be one block.
        prefill = workers["p0"] if assignment.spec.num_tokens <= PROMPT_TOKENS else None
        placement = Placement(fleet, self.num_places, prefill, workers["d0"], 5, 2, 1)
        self.placements.append(placement)
        self.perform(self.state.on_place(assignment, placement, self.world.now))

    def cancel(self) -> None:
        self.is_cancelled = True
        self.perform(self.state.on_close())

    def on_event(
        self, assignment: Assignment, number: int, event: SequenceEvent, *, is_source: bool
    ) -> None:
        report = self.state.on_source_event if is_source else self.state.on_event
        self.perform(report(assignment, number, event, self.world.now))

    def _open(self, assignment: Assignment, node: Node, source: KvSource, ticket: bytes) -> None:
        is_source = bool(ticket)
        node.num_handles += 1
        node.sinks[node.num_handles] = (self, assignment, 0, is_source)
        self.opened[assignment, is_source] = node, node.num_handles
        node.commands.append((node.num_handles, assignment.spec, source, ticket))

    def _abort(self, assignment: Assignment, *, is_source: bool) -> None:
        opened = self.opened.pop((assignment, is_source), None)
        if opened is not None:
            node, handle = opened
            if node.sinks.pop(handle, None) is not None:
                node.commands.append(core_commands.StreamCommand(0, handle, Abort()))

    def _deliver(self, choice: Choice) -> None:
        self.perform(self.state.on_delivery(choice))
        del self.news[choice]
        piece = choice.output.take()
        if piece is None:
            return
        require(not self.is_over, f"{self.name}: something follows its end")
        require(piece.token_index == len(self.tokens), f"{self.name}: tokens lost or doubled")
        self.tokens += [sample.token_id for sample in piece.samples]
        is_right = self.tokens == self.expected[: len(self.tokens)]
        require(is_right, f"{self.name}: tokens {self.tokens}, not {self.expected}")
        self.is_finished = piece.finish is not FinishReason.NONE


class World:
    """See the top."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.now = 0.0
        self.num_faults = bounds.num_faults
        self.num_cancels = bounds.num_cancels
        self.num_ticks = bounds.num_ticks
        self.hub = Hub(is_logged="replay" in bounds.faults)
        self.fleet = Fleet(["p0"], ["d0"])
        self.fleet.join("p0", make_info("p0", Tier.PREFILL), StubLink())
        self.fleet.join("d0", make_info("d0", Tier.DECODE), StubLink())
        self.prefill = Node("p0", self._prefill(1))
        self.decode = Node("d0", self._decode(1))
        self._adopt(self.prefill)
        self._adopt(self.decode)
        self.requests = [Request(self, i, bounds.num_places) for i in range(bounds.num_requests)]
        for request in self.requests:
            request.perform(request.state.on_start(0.0))
            request.place()

    def _prefill(self, boot: int) -> SimWorker:
        # So few that two prompts want the same.
        shape = SimShape(
            8,
            PROMPT_TOKENS,
            enable_prefix_caching=False,
            num_pool_blocks=self.bounds.prefill_blocks,
            layers=self.bounds.layers,
        )
        return SimPrefill(self.hub, lambda: self.now, shape, boot=boot)

    def _decode(self, boot: int) -> SimWorker:
        shape = SimShape(
            self.bounds.decode_blocks,
            PROMPT_TOKENS,
            enable_prefix_caching=False,
            layers=self.bounds.layers,
        )
        # A new boot draws the same ticket numbers, as in the worst case.
        return SimDecode(self.hub, lambda: self.now, shape, boot=boot)

    def _adopt(self, node: Node) -> None:
        worker = node.worker

        def runner(connection: SendConnection, name: str) -> Runner:
            node.runners.append(Runner(connection, name))
            return node.runners[-1]

        worker.sender._make_runner = runner
        worker.on_command = lambda: self._on_reported(node)

    # What may happen

    def choices(self) -> list[str]:
        """Names for `do`: what goes on by itself, then what time, clients and faults may bring."""
        return [*self.steps(), *self._disturbances()]

    def steps(self) -> list[str]:
        return list(self._steps())

    def _steps(self) -> Iterator[str]:
        # A gateway places nobody where a load report has said that there is no room.
        has_room = self.decode.worker.pool.num_available > 2
        for request in self.requests:
            if request.waiting and (has_room or not request.num_places):
                yield f"place {request.name}"
        for node in (self.decode, self.prefill):
            has_own = bool(node.worker.inbox) or node.is_busy
            if node.events:
                yield f"report {node.name}"
            if node.commands or has_own:
                yield f"step {node.name}"
            if node.commands and has_own:
                yield f"step early {node.name}"
            if node.commands and isinstance(node.commands[0], tuple) and node.commands[0][3]:
                yield f"open {node.name}"
            for index, runner in enumerate(node.runners):
                if self._may_run(runner):
                    yield f"send {node.name} {index}"
        for index, wire in enumerate(self.hub.wires):
            if wire.sent:
                yield f"take {index}"

    def _disturbances(self) -> Iterator[str]:
        if self.num_ticks and self._next_deadline() is not None:
            yield "tick"
        if self.num_cancels:
            for index, request in enumerate(self.requests):
                if not request.is_over:
                    yield f"cancel {index}"
        if not self.num_faults or all(request.is_over for request in self.requests):
            return
        faults = self.bounds.faults
        for index, wire in enumerate(self.hub.wires):
            if wire.lost:
                continue
            if wire.sent and not wire.landing:
                is_hello = isinstance(wire.sent[0][0], kv_pb2.KvHello)
                yield from (
                    f"{f} {index}" for f in ("lose", "repeat") if f in faults and not is_hello
                )
            if wire.sent and wire.sent[0][1] and "flip" in faults:
                yield f"flip {index}"
            if wire.answers and "lose answer" in faults:
                yield f"lose answer {index}"
            if "break" in faults:
                yield f"break {index}"
            if "replay" in faults and wire.log:
                yield f"replay {index}"
        yield from (f for f in ("kill decode", "kill prefill") if f in faults)

    def _may_run(self, runner: Runner) -> bool:
        if runner.is_over:
            return False
        connection = runner.connection
        session = connection._session
        if runner.tasks:
            return True
        if session is None:
            return False
        wire = session.connection
        assert isinstance(wire, Wire)
        is_late = not connection.is_idle and connection.next_deadline() <= self.now
        return bool(wire.answers) or (bool(wire.lost) and not wire.is_lost_seen) or is_late

    # What happens

    def do(self, name: str) -> None:
        verb, _, rest = name.rpartition(" ")
        match verb:
            case "place":
                self.requests[int(rest[1:])].place()
            case "report":
                self._report(self._node(rest))
            case "step" | "step early" | "open":
                self._step(self._node(rest), verb)
            case "take":
                self.hub.wires[int(rest)].take()
            case "cancel":
                self.num_cancels -= 1
                self.requests[int(rest)].cancel()
            case "" if rest == "tick":
                self.num_ticks -= 1
                self.tick()
            case _ if verb.startswith("send "):
                self._node(verb.removeprefix("send ")).runners[int(rest)].run()
            case _:
                self.num_faults -= 1
                self._fault(verb, rest)
        for wire in self.hub.wires:
            wire.report_aborts()
        # Lost wires and ended runners are left out, so that no states differ by them.
        self.hub.wires = [wire for wire in self.hub.wires if not wire.lost]
        for node in (self.prefill, self.decode):
            node.runners = [runner for runner in node.runners if not runner.is_over]

    def tick(self) -> None:
        """Time passes to the next deadline; engine loops turn then."""
        deadline = self._next_deadline()
        if deadline is None:
            return
        self.now = max(self.now, deadline)
        self.prefill.is_busy = self.decode.is_busy = True
        for request in self.requests:
            for assignment, due in list(request.timers.items()):
                if due <= self.now and assignment in request.timers:
                    del request.timers[assignment]
                    request.perform(request.state.on_timer(assignment, self.now))

    def _next_deadline(self) -> float | None:
        times = [t for request in self.requests for t in request.timers.values()]
        for node in (self.prefill, self.decode):
            tickets = node.worker.tickets._tickets.values()
            times += [ticket.deadline for ticket in tickets if ticket.is_open]
            connections = [r.connection for r in node.runners if not r.is_over]
            times += [c.next_deadline() for c in connections if not c.is_idle]
        return min(times, default=None)

    def _node(self, name: str) -> Node:
        return self.decode if name == "d0" else self.prefill

    def _step(self, node: Node, verb: str) -> None:
        if verb != "step early":
            for _ in range(1 if verb == "open" else len(node.commands)):
                self._give(node, node.commands.popleft())
        if verb == "open":
            return
        step = node.worker.step()
        node.is_busy = not step.is_idle
        require(step.load.num_orphan_blocks == 0, f"{node.name}: a block that nobody holds")
        require(step.load.num_orphan_sequences == 0, f"{node.name}: an orphan")
        events = tuple(event for event in step.events if event.handle in node.sinks)
        if events:
            node.events.append(events)

    def _give(
        self, node: Node, command: core_commands.Command | tuple[int, SequenceSpec, KvSource, bytes]
    ) -> None:
        if isinstance(command, tuple):
            handle, spec, source, ticket = command
            node.worker.open(0, handle, spec, source, ticket)
        else:
            node.worker.submit(command)

    def _report(self, node: Node) -> None:
        for event in node.events.popleft():
            sink = node.sinks.get(event.handle)
            if sink is None:
                continue
            if is_last(event.event):
                del node.sinks[event.handle]
            request, assignment, number, is_source = sink
            request.on_event(assignment, number, event.event, is_source=is_source)

    def _fault(self, verb: str, rest: str) -> None:
        if verb == "kill":
            self._kill(self.decode if rest == "decode" else self.prefill)
            return
        wire = self.hub.wires[int(rest)]
        match verb:
            case "lose":
                wire.sent.popleft()
            case "repeat":
                wire.sent.appendleft(wire.sent[0])
            case "flip":
                frame, payload = wire.sent[0]
                wire.sent[0] = frame, bytes([payload[0] ^ 1]) + payload[1:]
            case "lose answer":
                wire.answers.popleft()
            case "break":
                wire.lose("the network broke")
            case "replay":
                self._replay(wire)

    def _replay(self, wire: Wire) -> None:
        """Somebody who has read a connection sends the same on one of his own."""
        stranger = self.hub.connect(wire.name)
        for frame, payload in wire.log:
            if not stranger.lost:
                stranger.sent.append((frame, payload))
                while stranger.sent:
                    stranger.take()
        stranger.lose("the stranger is gone")

    def _kill(self, node: Node) -> None:
        """The process dies, and another one starts at its address."""
        node.worker.listener.close()
        for wire in self.hub.wires:
            if node is self.prefill or wire.name == node.name:
                wire.lose("the peer is gone")
                wire.is_lost_seen |= node is self.prefill
        boot = node.worker.boot + 1
        node.worker = self._decode(boot) if node is self.decode else self._prefill(boot)
        node.runners, node.ends, node.is_busy = [], {}, False
        node.commands.clear()
        node.events.clear()
        self._adopt(node)
        sinks = list(node.sinks.values())
        node.sinks.clear()
        lost = Failed("WORKER_LOST", f"{node.name} was killed", is_retriable=True)
        for request, assignment, number, is_source in sinks:
            request.on_event(assignment, number, lost, is_source=is_source)

    # What must hold

    def _on_reported(self, node: Node) -> None:
        """A ticket or a handoff has reported something."""
        event = node.worker.inbox[-1]
        if isinstance(event, TicketEvent) and not isinstance(event, PrefixRequested):
            self._count_end(node, event.ticket_id)
            if isinstance(event, TicketCommitted):
                self._check_kv(node, event)
        elif isinstance(event, SendDone):
            self._count_end(node, event.key)

    def _count_end(self, node: Node, key: object) -> None:
        node.ends[key] = node.ends.get(key, 0) + 1
        require(node.ends[key] == 1, f"{node.name}: {key} has ended twice")

    def _check_kv(self, node: Node, event: TicketCommitted) -> None:
        """The blocks hold all KV, and the slot the states, of the sequence that they are leased
        for, and no other."""
        owners = ledger_of(node.worker.core._state).owners
        (owner,) = [owner for owner in owners if owner.ticket_id == event.ticket_id]
        (request,) = [request for request in self.requests if request.name == owner.request_id]
        tokens = request.spec.prompt_token_ids
        wanted = prefilled(tuple(tokens), self.bounds.layers)
        block_id, kv = owner.block_ids[0], node.worker.engine.kv
        assert isinstance(kv, ArrayKvPool)
        is_own = bool((kv.data[block_id] == wanted.data[0]).all())
        require(is_own, f"{request.name}: committed KV is not its own")
        if kv.states and wanted.states:
            own = kv.states.data[kv.states.slots.of_block[block_id], 0]
            is_own = bool((own == wanted.states.data[0, 0]).all())
            require(is_own, f"{request.name}: committed states are not its own")

    def check(self) -> None:
        for node in (self.prefill, self.decode):
            node.worker.pool.check_integrity()
            self._check_senders_blocks(node)
            leased: set[int] = set()
            for owner in ledger_of(node.worker.core._state).owners:
                require(leased.isdisjoint(owner.block_ids), f"{node.name}: a block has two owners")
                leased.update(owner.block_ids)
            for ticket in node.worker.tickets._tickets.values():
                if ticket.num_pins:
                    holds = leased.issuperset(ticket.block_ids)
                    require(holds, f"{node.name}: a block of a freed ticket may be written")

    def _check_senders_blocks(self, node: Node) -> None:
        """What a sender may still read is leased: by a sequence that is here, unless it never had
        any, or has not had its turn."""
        core, inbox = node.worker.core, node.worker.inbox
        without = core._handoffs._rejected | core._admission._queued.keys()
        opening = [command for command in inbox if isinstance(command, core_commands.Open)]
        without |= {(command.stream, command.handle) for command in opening}
        without |= {command.key for command in inbox if isinstance(command, SendDone)}
        for key in node.worker.sender._placed.keys() - without:
            require(
                key in core._state.groups,
                f"{node.name}: blocks were given back that are still sent",
            )

    def settle(self) -> None:
        """Let all that still goes on come to its end; then nothing may be held by anybody."""
        is_undisturbed = self.bounds.num_faults == self.num_faults
        is_undisturbed &= self.bounds.num_ticks == self.num_ticks
        for _ in range(60):
            while steps := self.steps():
                self.do(steps[0])
                self.check()
            if self._next_deadline() is None:
                break
            self.tick()
        else:
            raise Violation("it never comes to an end")
        for request in self.requests:
            require(request.is_over, f"{request.name} never ends")
            if is_undisturbed and self.bounds.num_places > 1:
                is_right = request.is_cancelled or request.is_finished
                require(is_right, f"{request.name} failed for nothing: {request.error}")
            require(not request.state._assignments, f"{request.name}: an assignment is left")
            require(not request.opened or request.is_over, f"{request.name}: a handle is left")
        for node in (self.prefill, self.decode):
            worker = node.worker
            require(worker.pool.counts().leased == 0, f"{node.name} leaks a block")
            require(worker.tickets.num_open == 0, f"{node.name}: a ticket is open")
            require(not worker.tickets._tickets, f"{node.name}: a ticket is not forgotten")
            require(worker.sender.num_open == 0, f"{node.name}: a handoff is open")
            require(not node.sinks, f"{node.name}: somebody still listens")


@cache
def prefilled(tokens: tuple[int, ...], layers: OracleLayers) -> ArrayKvPool:
    """What the only block, and slot, hold after these tokens, in an engine of the world's shape."""
    engine = OracleEngine(OracleOptions(1, block_size=PROMPT_TOKENS, layers=layers))
    for table in engine.kv.slot_tables.values():
        table.of_block[0] = 0
    row = SampleRow(len(tokens) - 1, Sampling(), list(tokens), len(tokens), 0, None)
    engine.forward(Batch((SequenceSlice(list(tokens), 0, [0], (row,)),)))
    assert isinstance(engine.kv, ArrayKvPool)
    return engine.kv


@cache
def expected_tokens(tokens: tuple[int, ...], layers: OracleLayers) -> Sequence[int]:
    return oracle_tokens(tokens, SAMPLING, VOCAB, layers=layers)


_DECODING = Decoding(lambda ids: "".join(f"{i} " for i in ids))


#: What a state's digest leaves out: constants, what is only measured, and the oracle's clock, which
#: is real. Nothing of it decides what happens.
_OPAQUE = (
    Bounds,
    CoreLimits,
    Costs,
    Decoding,
    EngineSpec,
    Fleet,
    KvLayout,
    Matchers,
    OracleOptions,
    Placement,
    Policy,
    Sampling,
    SimShape,
    Timeline,
    logging.Logger,
    type,
)
_IGNORED = frozenset(
    {
        # A lookup that found no room is repeated, or not, with the same result.
        ("Admission", "_without_room"),
        ("Blocks", "num_gains"),
        ("Node", "ends"),
        ("OracleEngine", "_ends_s"),
        ("OracleEngine", "_weights"),
        ("Steps", "num_steps"),
        ("World", "fleet"),
        ("_OracleLaunch", "end_s"),
    }
)


def explore_handoffs(
    bounds: Bounds, max_states: int = 0, on_progress: Callable[[Found], None] = lambda _: None
) -> Found:
    """Every state within the bounds, or the first `max_states`."""
    digest = Digest(_OPAQUE, _IGNORED)
    # Blocks here are small, and are written in place nevertheless.
    with patch.object(codec, "MIN_VIEW_BYTES", 1):
        return explore(lambda: World(bounds), digest.of, max_states, on_progress)
