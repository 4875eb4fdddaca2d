"""Which NUMA node each worker of `baton serve` is kept to."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import ServeOptions
from baton.numa import NumaNode
from baton.supervisor.numa_places import kept_to_nodes, places_of
from baton.supervisor.plan import ChildSpec, plan_workers


def nodes_with(*num_cores: int) -> list[NumaNode]:
    """Nodes with numbers 0, 2, 4, ..., for the kernel may leave some out."""
    return [NumaNode(2 * i, frozenset(range(n))) for i, n in enumerate(num_cores)]


def node_in(spec: ChildSpec) -> int | None:
    found = [a for a in spec.arguments if a.startswith("--numa-node=")]
    assert len(found) <= 1
    return int(found[0].partition("=")[2]) if found else None


@given(st.lists(st.integers(1, 64), max_size=12), st.lists(st.integers(1, 64), max_size=8))
def test_no_node_has_more_threads_than_cores(sizes: list[int], num_cores: list[int]) -> None:
    nodes = nodes_with(*num_cores)
    threads = {f"decode-{i}": size for i, size in enumerate(sizes)}
    places = places_of(threads, nodes)
    used = Counter[int]()
    for name, number in places.items():
        used[number] += threads[name]
    for node in nodes:
        assert used[node.number] <= len(node.cores)
        if len(nodes) > 1:
            left_over = [threads[name] for name in threads.keys() - places.keys()]
            # None is left out that would still fit.
            assert all(size > len(node.cores) - used[node.number] for size in left_over)
    assert len(nodes) > 1 or not places


@given(st.integers(1, 6), st.integers(2, 6), st.integers(1, 8))
def test_equal_workers_spread_evenly(per_node: int, num_nodes: int, size: int) -> None:
    nodes = nodes_with(*[per_node * size] * num_nodes)
    names = [f"decode-{i}" for i in range(per_node * num_nodes)]
    counts = Counter(places_of(dict.fromkeys(names, size), nodes).values())
    assert counts == dict.fromkeys((node.number for node in nodes), per_node)


def test_a_large_worker_does_not_find_its_node_taken() -> None:
    places = places_of({"prefill-0": 4, "decode-0": 4, "decode-1": 8}, nodes_with(8, 8))
    assert places == {"decode-1": 0, "prefill-0": 2, "decode-0": 2}


def test_the_tiers_have_a_socket_each() -> None:
    options = ServeOptions(model="m")
    workers, line = kept_to_nodes(plan_workers(options, 32), nodes_with(16, 16))
    assert [node_in(spec) for spec in workers] == [0, 2]
    assert line == (
        "workers by NUMA node; node 0 (16 cores): prefill-0; node 2 (16 cores): decode-0; "
        "kept to none: none"
    )


def test_workers_that_start_later_have_their_places_too() -> None:
    options = ServeOptions(model="m", max_workers=4, planner="on", slo_ttft_ms=500)
    workers, _ = kept_to_nodes(plan_workers(options, 32), nodes_with(16, 16))
    assert [node_in(spec) for spec in workers] == [0, 2, 0, 2]


def test_one_node_changes_nothing() -> None:
    planned = plan_workers(ServeOptions(model="m"), 16)
    for nodes in ([], nodes_with(16)):
        assert kept_to_nodes(planned, nodes) == (planned, "")


def test_a_worker_larger_than_a_node_is_kept_to_none() -> None:
    planned = plan_workers(ServeOptions(model="m"), 32)
    workers, line = kept_to_nodes(planned, nodes_with(8, 8, 8, 8))
    assert workers == planned
    assert line.endswith("kept to none: prefill-0, decode-0")


@pytest.mark.parametrize("options", [{"numa_node": 2}, {"numa_node": -1}, {"device": "cuda"}])
def test_a_named_node_and_a_gpu_are_left_alone(options: dict[str, object]) -> None:
    planned = plan_workers(ServeOptions(model="m", **options), 32, num_gpus=2)
    workers, _ = kept_to_nodes(planned, nodes_with(16, 16))
    assert workers == planned
    assert [node_in(spec) for spec in workers] == [options.get("numa_node")] * 2


def test_on_a_host_with_gpus_workers_on_the_cpu_have_their_places() -> None:
    planned = plan_workers(ServeOptions(model="m", device="cpu"), 32, num_gpus=2)
    assert [node_in(spec) for spec in kept_to_nodes(planned, nodes_with(16, 16))[0]] == [0, 2]
