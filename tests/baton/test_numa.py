"""NUMA nodes as the kernel shows them, and a thread that is kept to one."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.numa import MPOL_PREFERRED, NumaNode, keep_to, node_of, parse_list, usable_nodes


def kernel(folder: Path, cores: Mapping[int, str], memory: str) -> tuple[Path, Path]:
    """The kernel's folder of nodes and the status of a process."""
    for number, text in cores.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{text}\n")
    (folder / "online").write_text("0-9\n")
    status = folder / "status"
    status.write_text(f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{memory}\n")
    return folder, status


@given(st.frozensets(st.integers(0, 200)))
def test_lists_of_the_kernel_are_read(numbers: frozenset[int]) -> None:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    text = ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
    assert parse_list(f"{text}\n") == numbers


def test_two_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    folder, status = kernel(tmp_path, {1: "4-7,12-15", 0: "0-3,8-11"}, "0-1")
    first, second = usable_nodes(frozenset(range(16)), folder, status)
    assert first == NumaNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11}))
    assert second == NumaNode(1, frozenset({4, 5, 6, 7, 12, 13, 14, 15}))


def test_only_cores_and_memory_that_this_process_may_use_count(tmp_path: Path) -> None:
    nodes = {0: "0-3", 1: "4-7", 2: "8-11", 10: "12-15", 3: ""}
    folder, status = kernel(tmp_path, nodes, "0-1,3,10")
    usable = usable_nodes(frozenset({2, 3, 9, 13}), folder, status)
    assert usable == (NumaNode(0, frozenset({2, 3})), NumaNode(10, frozenset({13})))


def test_without_nodes_there_are_none(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\n")
    assert usable_nodes(frozenset({0}), tmp_path / "gone", status) == ()


def test_all_memory_counts_where_the_kernel_divides_none(tmp_path: Path) -> None:
    folder, status = kernel(tmp_path, {0: "0-1"}, "")
    status.write_text("Name:\tpython\n")
    assert usable_nodes(frozenset({1}), folder, status) == (NumaNode(0, frozenset({1})),)


def test_a_node_that_cannot_be_used_is_refused_with_those_that_can() -> None:
    usable = usable_nodes(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match="numa_node=1023") as caught:
        node_of(1023)
    for node in usable:
        assert str(node.number) in str(caught.value)
        assert node_of(node.number) == node


def policy() -> tuple[int, int]:
    """This thread's memory policy, and the nodes that it names, a bit each."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode, words = ctypes.c_int(), (ctypes.c_ulong * 16)()
    num_bits = ctypes.c_ulong(8 * ctypes.sizeof(words))
    failed = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), words, num_bits, None, 0)
    if failed:
        pytest.skip("this kernel or container tells no memory policy")
    return mode.value, words[0]


def in_thread(run: Callable[[], None]) -> None:
    """Run in a thread of its own, which takes its cores and its policy with it."""
    failures: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001, raised below
            failures.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_a_thread_and_those_that_it_starts_are_kept_to_a_node() -> None:
    before = os.sched_getaffinity(0), policy()
    node = usable_nodes(before[0])[0]
    core = min(node.cores)

    def check(prefers: bool) -> None:
        assert os.sched_getaffinity(0) == {core}
        if prefers:
            assert policy() == (MPOL_PREFERRED, 1 << node.number)

    def run() -> None:
        prefers = keep_to(NumaNode(node.number, frozenset({core})))
        check(prefers)
        in_thread(lambda: check(prefers))

    in_thread(run)
    assert (os.sched_getaffinity(0), policy()) == before


def test_memory_that_the_kernel_refuses_leaves_the_cores() -> None:
    core = min(os.sched_getaffinity(0))

    def run() -> None:
        assert not keep_to(NumaNode(1000, frozenset({core})))
        assert os.sched_getaffinity(0) == {core}

    in_thread(run)
