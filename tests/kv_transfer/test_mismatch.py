"""Peers that do not fit report the field, and which peer has which value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import ConfigError, HandoffFailed, InvalidRequest, PeerMismatch
from baton.types import KvLayout, NumericsClass, NumericsRule, Sample
from baton.v1 import kv_pb2
from kv_transfer.send_connection import Finish
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.connector import make_connector, usable
from tests.support.kv_transports import ALL, REMOTE

LAYOUT = KvLayout("m", 3, 2, 4, "int64", 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "other"),
        ("num_layers", 2),
        ("parts", ("latent",)),
        ("num_kv_heads", 1),
        ("head_dim", 2),
        ("dtype", "float32"),
    ],
)
def test_a_ticket_of_another_layout_is_not_begun(make_rig, field, value):
    rig = make_rig("loopback", source_layout=replace(LAYOUT, **{field: value}))
    rig.sender.begin("k", rig.offer((0,), 0, 3).data)
    error = rig.done().error
    assert isinstance(error, PeerMismatch)
    assert error.metadata["field"] == field
    assert error.metadata["peer"] == "d0"
    assert error.metadata["expected"] == str(value)


@pytest.mark.parametrize("transport", ALL)
def test_a_receiver_refuses_by_name(make_rig, transport):
    rig = make_rig(transport, target_layout=replace(LAYOUT, fingerprint="other"))
    # The ticket lies, so that the sender tries.
    ticket = kv_pb2.KvTicket.FromString(rig.offer((0,), 0, 3).data)
    ticket.layout.fingerprint = "m"
    rig.sender.begin("k", ticket.SerializeToString())
    rig.sender.submit(Finish("k", 3, (Sample(1),), 0.0))
    error = rig.done().error
    assert isinstance(error, PeerMismatch)
    assert error.metadata["field"] == "fingerprint"
    assert error.metadata["peer"] == "d0"
    assert (error.metadata["actual"], error.metadata["expected"]) == ("other", "m")
    assert rig.events.empty()


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
@pytest.mark.parametrize("strict", ["sender", "receiver"])
def test_a_strict_worker_exchanges_no_kv_with_another_numerics_class(make_rig, transport, strict):
    best = NumericsClass("cpu", "avx512", "bfloat16", "1")
    other = replace(best, level="avx2")
    rig = make_rig(
        transport,
        source_rule=NumericsRule(best, is_strict=strict == "sender"),
        target_rule=NumericsRule(other, is_strict=strict == "receiver"),
    )
    rig.sender.begin("k", rig.offer((0,), 0, 3).data)
    rig.sender.submit(Finish("k", 3, (Sample(1),), 0.0))
    error = rig.done().error
    assert isinstance(error, PeerMismatch)
    assert error.metadata["field"] == "numerics.level"
    assert (error.metadata["expected"], error.metadata["actual"]) == ("avx512", "avx2")
    assert "--numerics" in error.message
    assert rig.events.empty()


@pytest.mark.parametrize("is_strict", [False, True])
def test_numerics_classes_do_not_matter_where_they_are_equal_or_nobody_is_strict(
    make_rig, is_strict
):
    ours = NumericsClass("cpu", "avx512", "bfloat16", "1")
    theirs = ours if is_strict else replace(ours, device="cuda")
    rig = make_rig(
        "loopback",
        source_rule=NumericsRule(ours, is_strict),
        target_rule=NumericsRule(theirs, is_strict),
    )
    rig.sender.begin("k", rig.offer((0,), 0, 3).data)
    rig.send_all("k", (0,), 3)
    assert rig.done().error is None


def test_a_worker_of_another_boot_is_not_sent_to(make_rig):
    rig = make_rig("loopback")
    ticket = kv_pb2.KvTicket.FromString(rig.offer((0,), 0, 3).data)
    ticket.generation += 1
    rig.sender.begin("k", ticket.SerializeToString())
    error = rig.done().error
    assert isinstance(error, HandoffFailed)
    assert "generation 8" in error.message


def test_garbage_is_refused_in_the_call(make_rig):
    rig = make_rig("loopback")
    with pytest.raises(InvalidRequest):
        rig.sender.begin("k", b"garbage")
    assert rig.sender.num_open == 0
    assert rig.dones.empty()


@pytest.mark.parametrize("transport", REMOTE)
def test_nobody_there_is_told(make_rig, transport):
    rig = make_rig(transport)
    ticket = rig.offer((0,), 0, 3)
    rig.running.close()
    rig.sender.begin("k", ticket.data)
    error = rig.done().error
    assert isinstance(error, HandoffFailed)
    assert rig.running.endpoints[0].address in error.message


SHM = Endpoint("shm", "/x", "host")
TCP = Endpoint("tcp", "h:1")
NIXL = Endpoint("nixl", "h:2")
LOOPBACK = Endpoint("loopback", "d0")


@pytest.mark.parametrize(
    ("transport", "reachable", "expected"),
    [
        ("auto", {TCP, SHM}, (SHM, TCP)),
        ("auto", {TCP}, (TCP,)),
        ("auto", {TCP, SHM, LOOPBACK}, (LOOPBACK, SHM, TCP)),
        ("auto", {TCP, SHM, NIXL}, (SHM, NIXL, TCP)),
        ("nixl", {TCP, SHM, NIXL}, (NIXL,)),
        ("shm", {TCP, SHM}, (SHM,)),
        ("tcp", {TCP, SHM}, (TCP,)),
        ("shm", {TCP}, ()),
    ],
)
def test_the_best_usable_endpoint_is_first(transport, reachable, expected):
    assert usable([TCP, NIXL, SHM, LOOPBACK], transport, reachable.__contains__) == expected


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="pigeon"):
        make_connector("pigeon")


def test_shared_memory_of_another_host_is_not_tried():
    endpoints = [Endpoint("shm", "/proc/self/exe", "elsewhere")]
    with pytest.raises(HandoffFailed, match="no connection over auto"):
        make_connector()(endpoints, 1.0)
