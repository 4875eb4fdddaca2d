"""KV over nixl between pools on GPUs: what is registered with the library, and that payloads pass
no host, on a double of the library that copies only within what was registered, and a double of the
device."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.types import KvLayout
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.packed import PackedPool
from kv_transfer.ticket import TicketCommitted
from kv_transfer.transport.nixl import QUARANTINE_S, Quarantine
from tests.support.device_double import DeviceArrayPool, DoubleMemory

INTS = KvLayout("m", 3, 2, 4, "int64", 4)
Descriptor = tuple[int, int, int]


class LibraryError(Exception):
    """What the double raises where the library would."""


@dataclass
class Agent:
    """See nixl_agent. registered: (kind, address, bytes, device) of memory."""

    name: str
    fabric: Fabric
    registered: list[tuple[str, int, int, int]] = field(default_factory=list)

    def register_memory(self, memory: list[tuple[int, int, int, str]], kind: str) -> Any:
        ((address, num_bytes, device, _),) = memory
        self.registered.append((kind, address, num_bytes, device))
        self.fabric.registered.append((kind, device))
        return self.registered[-1]

    def deregister_memory(self, registration: Any) -> None:
        self.registered.remove(registration)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, found: list[Descriptor], kind: str) -> tuple[str, Descriptor]:
        return kind, found[0]

    def initialize_xfer(self, operation: str, source: Any, target: Any, peer: str) -> Any:
        assert operation == "WRITE"
        for agent, (kind, (address, num_bytes, device)) in (
            (self, source),
            (self.fabric.agents[peer], target),
        ):
            if not any(
                (kind, device) == (known_kind, known_device)
                and start <= address
                and address + num_bytes <= start + size
                for known_kind, start, size, known_device in agent.registered
            ):
                raise LibraryError("memory that is not registered")
        return source[1], target[1]

    def transfer(self, handle: Any) -> str:
        (source, num_bytes, _), (target, _, _) = handle
        ctypes.memmove(target, source, num_bytes)
        return "DONE"

    def release_xfer_handle(self, _handle: Any) -> None: ...

    def get_new_notifs(self) -> None: ...


@dataclass
class Fabric:
    """All agents, and (kind, device) of all memory that was ever registered."""

    agents: dict[str, Agent] = field(default_factory=dict)
    registered: list[tuple[str, int]] = field(default_factory=list)

    def agent(self, name: str, _config: object) -> Agent:
        return self.agents.setdefault(name, Agent(name, self))


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """The test double in place of the library."""
    made = Fabric()
    api = SimpleNamespace(
        nixlBind=SimpleNamespace(nixlDoubleError=LibraryError),
        nixl_agent_config=lambda **_: None,
        nixl_agent=made.agent,
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "nixl" or find_spec(name))
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return made


def is_handed_over(rig: Any) -> bool:
    """One sequence of 11 tokens, in blocks 5, 2, 9 of the source and 3, 1, 0 of the target."""
    offered = rig.offer((3, 1, 0), 0, 11)
    rig.sender.begin("k", offered.data)
    rig.send_all("k", (5, 2, 9), 11)
    assert rig.done().error is None
    assert isinstance(rig.event(), TicketCommitted)
    return all(
        np.array_equal(rig.token(rig.source, (5, 2, 9), t), rig.token(rig.target, (3, 1, 0), t))
        for t in range(11)
    )


def test_memory_of_both_gpus_is_registered_and_kv_passes_no_host(make_rig, fabric, monkeypatch):
    for name in ("pack", "unpack"):
        monkeypatch.delattr(PackedPool, name)
    rig = make_rig(
        "nixl",
        source_layout=INTS,
        target_layout=INTS,
        make_source=DeviceArrayPool,
        make_target=DeviceArrayPool,
    )
    assert is_handed_over(rig)
    assert fabric.registered == [("VRAM", DoubleMemory.device_number)] * 2


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ArrayKvPool, ArrayKvPool),
        (DeviceArrayPool, ArrayKvPool),
        (ArrayKvPool, DeviceArrayPool),
    ],
)
def test_where_one_side_has_no_gpu_both_stage_in_host_memory(make_rig, fabric, source, target):
    rig = make_rig(
        "nixl", source_layout=INTS, target_layout=INTS, make_source=source, make_target=target
    )
    assert is_handed_over(rig)
    assert fabric.registered == [("DRAM", 0)] * 2


def test_a_payload_that_is_changed_on_its_way_kills_its_ticket(make_rig, fabric, monkeypatch):
    transfer = Agent.transfer

    def damage(self, handle):
        state = transfer(self, handle)
        (_, (target, _, _)) = handle
        ctypes.memset(target + 17, 0xA5, 1)
        return state

    monkeypatch.setattr(Agent, "transfer", damage)
    rig = make_rig(
        "nixl",
        source_layout=INTS,
        target_layout=INTS,
        make_source=DeviceArrayPool,
        make_target=DeviceArrayPool,
    )
    offered = rig.offer((3, 1, 0), 0, 11)
    rig.sender.begin("k", offered.data)
    rig.send_all("k", (5, 2, 9), 11)
    assert "checksum" in str(rig.done().error)
    assert fabric.registered


def test_device_memory_is_freed_when_its_quarantine_is_over():
    now = 0.0
    quarantine, memory = Quarantine(lambda: now), DoubleMemory()
    quarantine.keep(memory.allocate(mmap.PAGESIZE))
    now = QUARANTINE_S - 1
    quarantine.keep(memory.allocate(mmap.PAGESIZE))
    assert len(memory.allocated) == 2
    now = QUARANTINE_S
    quarantine.keep(mmap.mmap(-1, mmap.PAGESIZE))
    assert len(memory.allocated) == 1
