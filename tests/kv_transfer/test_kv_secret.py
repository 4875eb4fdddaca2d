"""Workers that share a secret: nobody else sends KV to them, gets KV from them, or changes KV on
its way."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, PeerMismatch
from baton.types import KvLayout, Sample, Sampling, SequenceSpec, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_to_proto
from engine.kv.tensors.array import ArrayKvPool
from kv_transfer.frame import (
    CHECKSUM_MASK,
    Frame,
    FrameError,
    chunk_checksum,
    commit_checksum,
    place_checksum,
)
from kv_transfer.handshake import ReceiverConfig
from kv_transfer.kv_secret import KvSecret, new_nonce, read_kv_secret
from kv_transfer.receiver import Receiver, ReceiverSession
from kv_transfer.ticket import Endpoint, TicketAborted, TicketCommitted, TicketEvent
from kv_transfer.ticket_table import TicketRules, TicketTable
from kv_transfer.transport.connection import Connection, Connector, Staged
from tests.support.kv_transports import ALL

SECRET, OTHER = KvSecret(b"0123456789abcdef"), KvSecret(b"0123456789abcdeF")
NOTHING = memoryview(b"")


def hand_over(rig: Any) -> tuple[Any, Any]:
    """One sequence of 11 tokens, in blocks 5, 2, 9 of the source and 3, 1, 0, 7 of the target; its
    two ends."""
    offered = rig.offer((3, 1, 0, 7), 0, 11)
    rig.sender.begin("k", offered.data)
    rig.send_all("k", (5, 2, 9), 11)
    return rig.done(), offered


def is_whole(rig: Any) -> bool:
    return all(
        np.array_equal(rig.token(rig.source, (5, 2, 9), t), rig.token(rig.target, (3, 1, 0, 7), t))
        for t in range(11)
    )


@pytest.mark.parametrize("transport", ALL)
def test_workers_that_share_it_hand_over(make_rig: Any, transport: str) -> None:
    rig = make_rig(transport, source_secret=SECRET, target_secret=KvSecret(b"0123456789abcdef"))
    done, _ = hand_over(rig)
    assert done.error is None
    assert isinstance(rig.event(), TicketCommitted)
    assert is_whole(rig)


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize(
    ("source", "target"), [(SECRET, OTHER), (OTHER, SECRET), (SECRET, None), (None, SECRET)]
)
def test_workers_that_do_not_are_told_so_and_nothing_is_sent(
    make_rig: Any, transport: str, source: KvSecret | None, target: KvSecret | None
) -> None:
    rig = make_rig(transport, source_secret=source, target_secret=target)
    done, offered = hand_over(rig)
    assert isinstance(done.error, PeerMismatch)
    assert done.error.metadata["field"] == "kv_secret"
    assert done.num_bytes == 0
    assert not rig.target.data.any()
    rig.running.close()
    dead = rig.event()
    assert isinstance(dead, TicketAborted)
    assert dead.ticket_id == offered.ticket_id


# Somebody on the way, who reads and writes every frame, and knows all but the secret.

Alter = Callable[[Frame, memoryview], None]


class Tap:
    """A connection that alters frames on their way."""

    def __init__(self, connection: Connection, alter: Alter) -> None:
        self._connection = connection
        self._alter = alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        arriving = copy.deepcopy(frame)  # the sender goes by what it said
        self._alter(arriving, staged.buffer if staged else NOTHING)
        self._connection.send(arriving, staged, more=more)

    def receive(self) -> Frame | None:
        frame = self._connection.receive()
        if frame is not None:
            self._alter(frame, NOTHING)
        return frame


def tapped(alter: Alter) -> Callable[[Connector], Connector]:
    def tap(connect: Connector) -> Connector:
        def connect_tapped(endpoints: Sequence[Endpoint], timeout_s: float) -> Any:
            return Tap(connect(endpoints, timeout_s), alter)

        return connect_tapped

    return tap


def other_payload(frame: Frame, payload: memoryview) -> None:
    if isinstance(frame, kv_pb2.KvChunk):
        payload[0] ^= 1
        frame.place_checksum = place_checksum(frame)
        frame.checksum = chunk_checksum(frame, (payload,))


def other_place(frame: Frame, payload: memoryview) -> None:
    if isinstance(frame, kv_pb2.KvChunk) and frame.num_tokens < 11:
        frame.first_token = 0 if frame.first_token else 1
        frame.place_checksum = place_checksum(frame)
        frame.checksum = chunk_checksum(frame, (payload,))


def other_first_token(frame: Frame, payload: memoryview) -> None:
    """The sum of the chunks' digests is known to who has read them; that of the commit cannot be
    made."""
    del payload
    if isinstance(frame, kv_pb2.KvCommit):
        frame.first_tokens[0].token_id += 1


def other_logprobs(frame: Frame, payload: memoryview) -> None:
    del payload
    if isinstance(frame, kv_pb2.KvCommit):
        frame.first_tokens[0].logprobs.chosen.logprob = -0.5


def other_versions(frame: Frame, payload: memoryview) -> None:
    del payload
    if isinstance(frame, kv_pb2.KvHello):
        frame.max_version += 1


def other_type_of_kv(frame: Frame, payload: memoryview) -> None:
    del payload
    if isinstance(frame, kv_pb2.KvAccept):
        frame.wire_dtype = "float32"


def no_secrets(frame: Frame, payload: memoryview) -> None:
    """Makes each end believe that the other has none."""
    del payload
    if isinstance(frame, kv_pb2.KvHello | kv_pb2.KvAccept):
        frame.ClearField("nonce")


ATTACKS = [
    other_payload,
    other_place,
    other_first_token,
    other_logprobs,
    other_versions,
    other_type_of_kv,
    no_secrets,
]


@pytest.mark.parametrize("alter", ATTACKS)
def test_what_is_altered_on_the_way_is_never_committed(make_rig: Any, alter: Alter) -> None:
    rig = make_rig("loopback", source_secret=SECRET, target_secret=SECRET, tap=tapped(alter))
    done, _ = hand_over(rig)
    assert done.error is not None
    rig.running.close()
    assert isinstance(rig.event(), TicketAborted)
    assert rig.events.empty()


def test_without_a_secret_a_forger_would_get_through(make_rig: Any) -> None:
    """So the attack above is one."""
    rig = make_rig("loopback", tap=tapped(_forge_all_without_a_key()))
    done, _ = hand_over(rig)
    assert done.error is None
    assert isinstance(rig.event(), TicketCommitted)
    assert not is_whole(rig)


def _forge_all_without_a_key() -> Alter:
    sums = [0, 0]

    def alter(frame: Frame, payload: memoryview) -> None:
        if isinstance(frame, kv_pb2.KvChunk):
            sums[0] += frame.checksum
            other_payload(frame, payload)
            sums[1] += frame.checksum
        elif isinstance(frame, kv_pb2.KvCommit):
            frame.checksum = (frame.checksum - sums[0] + sums[1]) % 2**64

    return alter


# Payloads in memory that only one user's processes reach.


@pytest.mark.parametrize(("transport", "is_keyed"), [("shm", False), ("tcp", True)])
def test_only_payloads_on_a_network_are_digested_under_the_key(
    make_rig: Any, transport: str, is_keyed: bool
) -> None:
    plain = []

    def look(frame: Frame, payload: memoryview) -> None:
        if isinstance(frame, kv_pb2.KvChunk):
            plain.append(frame.checksum == chunk_checksum(frame, (payload,)))

    rig = make_rig(transport, source_secret=SECRET, target_secret=SECRET, tap=tapped(look))
    done, _ = hand_over(rig)
    assert done.error is None
    assert is_whole(rig)
    assert plain
    assert set(plain) == {not is_keyed}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_payload_that_is_changed_behind_its_header_is_never_committed(
    make_rig: Any, transport: str
) -> None:
    def change(frame: Frame, payload: memoryview) -> None:
        if isinstance(frame, kv_pb2.KvChunk):
            payload[-1] ^= 1

    rig = make_rig(transport, source_secret=SECRET, target_secret=SECRET, tap=tapped(change))
    done, _ = hand_over(rig)
    assert done.error is not None
    assert isinstance(rig.event(), TicketAborted)


@pytest.mark.parametrize(
    ("known", "best", "agreed"),
    [(2, 2, 2), (0, 2, 0), (2, 0, 0), (1, 1, 1), (0, 1, 1), (2, 1, 0)],
)
def test_a_kind_of_checksum_is_chosen_if_the_sender_knows_it_and_the_way_has_it(
    known: int, best: int, agreed: int
) -> None:
    """0, 1: kinds of release 0.1.0; its senders name none."""
    door = Door()
    session = door.receiver.session(
        door.replies.append, checksum=kv_pb2.KvPayloadChecksum.ValueType(best)
    )
    hello = hello_of(new_nonce())
    hello.payload_checksums.extend([kv_pb2.KvPayloadChecksum.ValueType(known)] if known else [])
    session.on_frame(hello, NOTHING)
    (accept,) = door.replies
    assert isinstance(accept, kv_pb2.KvAccept)
    assert accept.payload_checksum == agreed


# Somebody who connects.

LAYOUT = KvLayout("m", 2, 1, 2, "int64", 4)
OWNER = WorkerIdentity("d0", 7)


class Door:
    """A receiver with the secret, and what it answers."""

    def __init__(self) -> None:
        self.events: list[TicketEvent] = []
        self.replies: list[Frame] = []
        self.pool = ArrayKvPool(LAYOUT, 8)
        self.table = TicketTable(
            OWNER,
            LAYOUT,
            (),
            TicketRules(10.0, secret=b"s" * 32, draw_id=lambda: 1),
            self.events.append,
            lambda: 0.0,
        )
        self.receiver = Receiver(
            ReceiverConfig(OWNER, self.pool, 1, 1 << 12, secret=SECRET), self.table
        )

    def knock(self, hello: kv_pb2.KvHello) -> tuple[ReceiverSession, kv_pb2.KvAccept]:
        session = self.receiver.session(self.replies.append)
        session.on_frame(hello, NOTHING)
        accept = self.replies.pop()
        assert isinstance(accept, kv_pb2.KvAccept)
        return session, accept


def hello_of(nonce: bytes) -> kv_pb2.KvHello:
    return kv_pb2.KvHello(
        min_version=1,
        max_version=1,
        worker_id="p0",
        generation=3,
        layout=layout_to_proto(LAYOUT),
        nonce=nonce,
    )


def test_before_the_proof_nothing_else_is_heard() -> None:
    door = Door()
    spec = SequenceSpec("r", (1, 2, 3), Sampling())
    ticket = door.table.offer(spec, (3,), 0, 3)
    for frame in (
        kv_pb2.KvBegin(ticket=ticket.data),
        kv_pb2.KvChunk(ticket_id=1),
        kv_pb2.KvCommit(ticket_id=1),
        kv_pb2.KvRenew(ticket_ids=[1]),
        kv_pb2.KvFetchPrefix(ticket_id=1),
        kv_pb2.KvAbort(ticket_id=1, epoch=1),
    ):
        session, _ = door.knock(hello_of(new_nonce()))
        with pytest.raises(FrameError, match="before the KvProof"):
            session.on_frame(frame, NOTHING)
    assert not door.events, "a stranger ends no ticket"


def test_a_proof_of_another_connection_counts_for_nothing() -> None:
    door = Door()
    hello = hello_of(new_nonce())
    session, accept = door.knock(hello)
    overheard = kv_pb2.KvProof(proof=SECRET.sender_proof(hello, accept))
    session.on_frame(overheard, NOTHING)
    for wrong in (overheard, kv_pb2.KvProof(proof=accept.proof), kv_pb2.KvProof()):
        session, _ = door.knock(hello)
        with pytest.raises(FrameError, match="wrong proof"):
            session.on_frame(wrong, NOTHING)


@pytest.mark.parametrize("nonce", [b"", b"short"])
def test_who_poses_no_challenge_is_refused(nonce: bytes) -> None:
    door = Door()
    session = door.receiver.session(door.replies.append)
    session.on_frame(hello_of(nonce), NOTHING)
    (refusal,) = door.replies
    assert isinstance(refusal, kv_pb2.KvRefuse)
    assert refusal.field == "kv_secret"
    assert session.handshake.is_refused


# The digests.

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "nonce": st.binary(min_size=16, max_size=20),
    "worker_id": st.text(max_size=3),
    "generation": st.integers(0, 3),
}
HELLOS = st.builds(
    kv_pb2.KvHello, max_version=st.integers(0, 2), min_version=st.integers(0, 2), **FIELDS
)
ACCEPTS = st.builds(
    kv_pb2.KvAccept, version=st.integers(0, 2), wire_dtype=st.text(max_size=3), **FIELDS
)


@given(HELLOS, ACCEPTS, HELLOS, ACCEPTS)
def test_proofs_and_keys_are_of_one_connection_one_role_and_one_secret(
    hello: kv_pb2.KvHello,
    accept: kv_pb2.KvAccept,
    hello_2: kv_pb2.KvHello,
    accept_2: kv_pb2.KvAccept,
) -> None:
    def digests(secret: KvSecret, h: kv_pb2.KvHello, a: kv_pb2.KvAccept) -> set[bytes]:
        return {secret.receiver_proof(h, a), secret.sender_proof(h, a), secret.connection_key(h, a)}

    first = digests(SECRET, hello, accept)
    assert len(first) == 3
    assert not first & digests(OTHER, hello, accept)
    is_same = (hello, accept) == (hello_2, accept_2)
    assert (first == digests(SECRET, hello_2, accept_2)) == is_same
    assert bool(first & digests(SECRET, hello_2, accept_2)) == is_same


@given(st.binary(min_size=1, max_size=40), st.lists(st.integers(0, 40)), st.binary(max_size=5))
def test_a_keyed_checksum_is_of_the_bytes_however_they_are_cut(
    payload: bytes, cuts: list[int], more: bytes
) -> None:
    chunk, key = kv_pb2.KvChunk(ticket_id=1, num_tokens=2, checksum=5), b"k" * 32
    ends = sorted({0, len(payload), *(cut for cut in cuts if cut < len(payload))})
    pieces = [memoryview(payload)[a:b] for a, b in itertools.pairwise(ends)]
    whole = chunk_checksum(chunk, (memoryview(payload),), key)
    assert chunk_checksum(chunk, pieces, key) == whole
    assert chunk.checksum == 5
    assert chunk_checksum(chunk, pieces, b"K" * 32) != whole
    if more:
        assert chunk_checksum(chunk, (*pieces, memoryview(more)), key) != whole


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31), max_size=3))
def test_a_commit_tells_the_sum_of_its_chunks_to_who_has_the_key(
    chunks: int, token_ids: list[int]
) -> None:
    key = b"k" * 32
    commit = kv_pb2.KvCommit(ticket_id=1, epoch=2, num_tokens=3)
    for token_id in token_ids:
        commit.first_tokens.add(token_id=token_id)
    commit.checksum = commit_checksum(commit, chunks, key)
    stated = commit.checksum - commit_checksum(commit, 0, key)
    assert stated & CHECKSUM_MASK == chunks
    assert commit_checksum(commit, chunks) != commit.checksum
    commit.first_tokens.add(token_id=1)
    assert commit_checksum(commit, chunks, key) != commit.checksum


# The file.


def test_the_secret_of_a_file_is_without_the_white_space_around_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("0123456789abcdef")
    (tmp_path / "b").write_text("\n0123456789abcdef \n")
    hello, accept = hello_of(b"n" * 16), kv_pb2.KvAccept(nonce=b"m" * 16)
    found = [read_kv_secret(str(tmp_path / name)) for name in "ab"]
    assert {s.sender_proof(hello, accept) for s in found if s} == {
        SECRET.sender_proof(hello, accept)
    }
    assert read_kv_secret(None) is None


@pytest.mark.parametrize("content", [None, b"", b"too short", b" " * 100])
def test_a_file_without_a_good_secret_stops_the_worker(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="kv_secret_file") as caught:
        read_kv_secret(str(path))
    assert not (content or b"").strip() or "too short" not in str(caught.value)


def test_a_secret_shows_itself_to_nobody() -> None:
    assert "0123456789abcdef" not in repr(SECRET)
    assert "0123456789abcdef" not in str(Sample(1)) + repr(vars(SECRET))
