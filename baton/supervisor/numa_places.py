"""The NUMA node that each worker is kept to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.numa import NumaNode
from baton.supervisor.plan import ChildSpec


def kept_to_nodes(
    workers: Sequence[ChildSpec], nodes: Sequence[NumaNode]
) -> tuple[tuple[ChildSpec, ...], str]:
    """The workers, those in `places_of` with the option that keeps them to their node, and a line
    that says who is where; empty where there are not several nodes."""
    places = places_of({w.name: w.cpu_threads for w in workers if w.cpu_threads}, nodes)
    kept = tuple(
        replace(worker, arguments=(f"--numa-node={places[worker.name]}", *worker.arguments))
        if worker.name in places
        else worker
        for worker in workers
    )
    if len(nodes) < 2:
        return kept, ""
    by_node = [
        f"node {node.number} ({len(node.cores)} cores): "
        + (", ".join(name for name, at in places.items() if at == node.number) or "none")
        for node in nodes
    ]
    others = ", ".join(worker.name for worker in workers if worker.name not in places)
    return kept, "; ".join(("workers by NUMA node", *by_node, f"kept to none: {others or 'none'}"))


def places_of(threads: Mapping[str, int], nodes: Sequence[NumaNode]) -> Mapping[str, int]:
    """Numbers of nodes by worker, without those of workers that fit into none; empty where there
    are not several nodes. threads: of each worker, a core for each.

    The largest worker is placed first, each where most cores are left, so that workers spread over
    nodes.
    """
    if len(nodes) < 2:
        return {}
    left = {node.number: len(node.cores) for node in nodes}
    places: dict[str, int] = {}
    for name in sorted(threads, key=threads.__getitem__, reverse=True):
        number = max(left, key=left.__getitem__)
        if threads[name] <= left[number]:
            left[number] -= threads[name]
            places[name] = number
    return places
