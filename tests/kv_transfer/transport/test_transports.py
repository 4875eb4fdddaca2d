"""The list of transports is whole: each has its code and its number on the wire, and options and
checks offer what is on it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from baton.config.fields import Transport
from baton.doctor.machine import check_kv_transports
from baton.errors import ConfigError
from baton.kv_transports import (
    AUTO,
    AUTOMATIC,
    KV_TRANSPORTS,
    REMOTE,
    KvTransport,
    Scope,
    kv_transport,
    takes_port,
)
from baton.types import KvLayout, WorkerIdentity
from baton.v1 import kv_pb2
from kv_transfer.ticket import Endpoint, parse_ticket
from kv_transfer.transport.base import Transport as TransportCode
from kv_transfer.transport.base import transport_named
from tests.support.tickets import ticket_of

FOLDER = Path(__file__).parents[3] / "kv_transfer" / "transport"
#: What several transports stand on.
SHARED = {
    "__init__",
    "base",
    "connection",
    "connector",
    "listeners",
    "stream",
    "tcp_stream",
    "tls",
    "unix_stream",
}

LAYOUT = KvLayout("f", 1, 1, 8, "float32", 4)
OWNER = WorkerIdentity("d0", 1)


def test_each_has_its_file_and_each_file_is_listed() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert files - SHARED == {each.name for each in KV_TRANSPORTS}
    assert all(isinstance(transport_named(each.name), TransportCode) for each in KV_TRANSPORTS)


def test_each_has_its_number_on_the_wire_and_comes_back_from_it() -> None:
    names = {name.removeprefix("KV_TRANSPORT_").lower() for name, _ in kv_pb2.KvTransport.items()}
    assert names - {"unspecified"} == {each.name for each in KV_TRANSPORTS}
    endpoints = tuple(Endpoint(each.name, "a", "h") for each in KV_TRANSPORTS)
    assert parse_ticket(ticket_of(OWNER, LAYOUT, 4, endpoints=endpoints)).endpoints == endpoints


def test_one_that_only_a_newer_peer_knows_is_left_out() -> None:
    newer = kv_pb2.KvTicket.FromString(
        ticket_of(OWNER, LAYOUT, 4, endpoints=[Endpoint("tcp", "h:1")])
    )
    newer.endpoints.add(transport=99, address="a")  # type: ignore[arg-type]
    assert parse_ticket(newer.SerializeToString()).endpoints == (Endpoint("tcp", "h:1"),)


def test_options_offer_what_reaches_other_processes() -> None:
    assert set(get_args(Transport)) == {AUTO, *(each.name for each in REMOTE)}
    assert all(kv_transport(name).scope is not Scope.PROCESS for name in AUTOMATIC)


def test_a_port_is_taken_by_those_that_reach_the_network() -> None:
    assert [name for name in get_args(Transport) if takes_port(name)] == [AUTO, "nixl", "tcp"]


def test_an_unknown_one_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"kv_transport='?pigeon.*shm"):
        kv_transport("pigeon")


def test_the_doctor_names_what_is_there_and_how_to_install_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = KvTransport("wing", Scope.NETWORK, "", package="no_such_wing", install="get wing")
    monkeypatch.setattr("baton.doctor.machine.REMOTE", (kv_transport("shm"), lacking))
    assert check_kv_transports().found == "shm; not installed: wing: get wing"
