"""NUMA nodes: groups of cores with memory of their own, which other cores reach more slowly."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")

#: Number of set_mempolicy, for which libc has no function, by machine.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}

#: Take memory of the given node while it has some, then of others.
MPOL_PREFERRED = 1

_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """number: the kernel's. cores: those that this process may use; never empty."""

    number: int
    cores: frozenset[int]


def usable_nodes(
    cores: Set[int], folder: Path = _NODES, status: Path = _STATUS
) -> tuple[NumaNode, ...]:
    """The nodes with some of `cores` and with memory that this process may use, by number; empty
    where the kernel shows none. folder, status: the kernel's."""
    allowed = re.search(r"^Mems_allowed_list:(.*)$", status.read_text(), re.MULTILINE)
    memory = None if allowed is None else parse_list(allowed[1])
    found: list[NumaNode] = []
    for each in folder.glob("node[0-9]*"):
        number = int(each.name.removeprefix("node"))
        usable = parse_list((each / "cpulist").read_text()) & cores
        if usable and (memory is None or number in memory):
            found.append(NumaNode(number, usable))
    return tuple(sorted(found, key=lambda node: node.number))


def parse_list(text: str) -> frozenset[int]:
    """Numbers of a list in the kernel's form: "0-3,8" is 0, 1, 2, 3, 8; none for an empty one."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        number for first, _, last in spans for number in range(int(first), int(last or first) + 1)
    )


def node_of(number: int) -> NumaNode:
    """The node of --numa-node. Raises ConfigError if this process may not use it."""
    nodes = {node.number: node for node in usable_nodes(os.sched_getaffinity(0))}
    if number not in nodes:
        usable = f"give one of {', '.join(map(str, nodes))}, or -1" if nodes else "leave it out"
        raise ConfigError.of(
            "numa_node", number, f"this process may not use its cores and memory; {usable}"
        )
    return nodes[number]


def keep_to(node: NumaNode) -> bool:
    """Keep this thread, and threads and processes that it starts from now on, to the cores of a
    node, and prefer its memory. Returns whether the kernel takes the preference; containers may
    forbid it, and memory is then on the node of the core that first writes it, as without."""
    os.sched_setaffinity(0, node.cores)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_ulong * (node.number // _BITS_PER_WORD + 1))()
    words[-1] = 1 << node.number % _BITS_PER_WORD
    # The kernel reads one bit less than it is told.
    num_bits = ctypes.c_ulong(len(words) * _BITS_PER_WORD + 1)
    return bool(ctypes.CDLL(None).syscall(number, MPOL_PREFERRED, words, num_bits) == 0)
