"""KV over TCP with TLS: the same handoffs, and nobody without a certificate of the authority."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.errors import Cancelled, ConfigError, HandoffFailed
from baton.rpc.tls import TlsFiles
from baton.types import KvLayout
from kv_transfer.send_connection import FetchPrefix
from kv_transfer.ticket import PrefixRequested, TicketCommitted
from kv_transfer.transport.tls import client_contexts
from tests.support.certificates import Authority

#: 1 MiB a block: chunks of many TLS records, and more than any socket's buffer.
LARGE = KvLayout("m", 4, 8, 128, "float32", 32)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> TlsFiles:
    return authority.files("127.0.0.1")


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("theirs")).files("127.0.0.1")


def hand_over(rig: Any, num_tokens: int = 11) -> Any:
    offered = rig.offer((3, 1, 0, 7), 0, num_tokens)
    rig.sender.begin("k", offered.data)
    rig.send_all("k", (5, 2, 9), num_tokens)
    return rig.done()


def check_whole(rig: Any, num_tokens: int = 11) -> None:
    done = hand_over(rig, num_tokens)
    assert done.error is None
    assert isinstance(rig.event(), TicketCommitted)
    for token in range(num_tokens):
        sent = rig.token(rig.source, (5, 2, 9), token)
        assert np.array_equal(sent, rig.token(rig.target, (3, 1, 0, 7), token))


def test_small_chunks_arrive(make_rig: Any, own: TlsFiles) -> None:
    check_whole(make_rig("tcp", source_tls=own, target_tls=own))


def test_large_chunks_arrive(make_rig: Any, own: TlsFiles) -> None:
    rig = make_rig(
        "tcp",
        source_layout=LARGE,
        target_layout=LARGE,
        sender_chunk_bytes=1 << 22,
        receiver_chunk_bytes=1 << 22,
        source_tls=own,
        target_tls=own,
    )
    check_whole(rig, 90)


def test_a_name_may_stand_for_all_hosts(make_rig: Any, authority: Authority) -> None:
    named = authority.files("baton.internal")
    check_whole(
        make_rig("tcp", source_tls=replace(named, server_name="baton.internal"), target_tls=named)
    )


def test_who_does_not_belong_is_kept_out(
    make_rig: Any, own: TlsFiles, strange: TlsFiles, authority: Authority
) -> None:
    mixed = replace(strange, ca_certs=own.ca_certs)
    pairs = {
        "a sender of a stranger": (mixed, own),
        "a sender that trusts a stranger": (replace(own, ca_certs=strange.ca_certs), own),
        "a receiver of a stranger": (own, mixed),
        "a receiver of another name": (own, authority.files("elsewhere.test")),
        "a sender in plain text": (None, own),
        "a receiver in plain text": (own, None),
    }
    for name, (source, target) in pairs.items():
        rig = make_rig("tcp", source_tls=source, target_tls=target, connect_timeout_s=2.0)
        done = hand_over(rig)
        assert isinstance(done.error, HandoffFailed), name
        assert not rig.target.data.any(), name


def test_who_greets_slowly_holds_up_nobody(make_rig: Any, own: TlsFiles) -> None:
    rig = make_rig("tcp", source_tls=own, target_tls=own)
    host, port = rig.running.endpoints[0].address.split(":")
    with socket.create_connection((host, int(port))) as silent:
        check_whole(rig)
        assert silent.recv(1) == b"", "it is hung up on in the end"


def test_a_receiver_closes_while_somebody_greets(make_rig: Any, own: TlsFiles) -> None:
    rig = make_rig("tcp", source_tls=own, target_tls=own)
    host, port = rig.running.endpoints[0].address.split(":")
    with socket.create_connection((host, int(port))):
        rig.close()


def test_broken_files_are_told_when_the_worker_starts(own: TlsFiles) -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile"):
        client_contexts(replace(own, keyfile="no-such.key"))


def test_a_ticket_s_death_is_told_through_it(make_rig: Any, own: TlsFiles) -> None:
    """What TLS has read ahead counts as come, else nobody would wait for the socket."""
    rig = make_rig("tcp", clock=lambda: 100.0, source_tls=own, target_tls=own)
    offered = rig.offer((3, 1, 0, 7), 0, 11)
    rig.sender.begin("k", offered.data)
    rig.sender.submit(FetchPrefix("k", b"no ticket"))
    assert isinstance(rig.event(), PrefixRequested)
    rig.running.tickets.abort(offered.ticket_id, "CANCELLED", "enough")
    assert isinstance(rig.done().error, Cancelled)
