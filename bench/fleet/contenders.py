"""What is compared: fixed shapes of a fleet, and the one that the planner steers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from baton.types import Slo, Tier
from bench.fleet.cluster import Shape
from bench.fleet.worker import MAX_MODEL_LEN, Hardware
from gateway.routing.dispatcher import Placing
from gateway.routing.fleet import Fleet
from gateway.routing.router import DecodeView, Need, Plan, Verdict
from worker_core.policy import (
    Policy,
    colocated_policy,
    decode_policy,
    learned_local_prefill,
    pinned_local_prefill,
    prefill_policy,
)

#: Tokens of a step of colocated workers that bound gaps by nothing else.
CHUNKS = (512, 2048)


def split(num_prefill: int, num_workers: int, decode: Policy, slo: Slo) -> Shape:
    """Fixed tiers."""
    return Shape([prefill_policy(slo)] * num_prefill + [decode] * (num_workers - num_prefill))


def splits(hardware: Hardware, num_workers: int, slo: Slo, num_tried: int = 3) -> dict[str, Shape]:
    """Fixed splits to search: shares of prefill workers, with prompts shared by load and without.
    num_tried: shares."""
    apart = decode_policy(pinned_local_prefill(hardware.block_size))
    shared = decode_policy(learned_local_prefill(hardware.spec, slo))
    numbers = {max(1, round(num_workers * (i + 1) / (num_tried + 1))) for i in range(num_tried)}
    return {
        f"{number}:{num_workers - number} {name}": split(number, num_workers, policy, slo)
        for number in sorted(numbers)
        for name, policy in (("apart", apart), ("sharing", shared))
    }


def least_loaded(
    need: Need, fleet: Fleet, matched: Mapping[str, int], key: bytes
) -> Plan | Verdict:
    """Places on the worker with the fewest sequences."""
    del matched, key
    return _least(need, [w.decode_view() for w in fleet.ready(Tier.DECODE)], _num_sequences)


def cache_aware(need: Need, fleet: Fleet, matched: Mapping[str, int], key: bytes) -> Plan | Verdict:
    """Places by the tokens to compute and the KV in use, as KV-aware routers of others do: the sum
    of prompt blocks to compute, queued ones included, and of blocks in use."""
    del key
    views = [worker.decode_view(matched) for worker in fleet.ready(Tier.DECODE)]
    return _least(need, views, partial(_blocks_of_work, need.num_tokens))


def _num_sequences(view: DecodeView) -> float:
    return view.num_sequences


def _blocks_of_work(num_tokens: int, view: DecodeView) -> float:
    num_tokens = view.pending_tokens + num_tokens - view.matched_tokens
    num_used = view.num_blocks - view.num_available_blocks
    return num_tokens / view.layout.block_size + num_used


def _least(
    need: Need, views: Sequence[DecodeView], cost: Callable[[DecodeView], float]
) -> Plan | Verdict:
    roomy = [view for view in views if view.has_room(need)]
    if not roomy:
        return Verdict.NOT_NOW if any(view.fits(need) for view in views) else Verdict.NO_WORKER
    return Plan(None, min(roomy, key=cost).address)


def chunked(num_workers: int, chunk: int, placing: Placing) -> Shape:
    """Colocated workers with chunks of one size."""
    policy = decode_policy(pinned_local_prefill(MAX_MODEL_LEN, gap_rule=None))
    policy = replace(policy, is_colocated=True)
    return Shape([policy] * num_workers, placing, max_num_batched_tokens=chunk)


def colocated(hardware: Hardware, num_workers: int, slo: Slo) -> Shape:
    """Colocated workers that keep the targets."""
    return Shape([colocated_policy(hardware.spec, slo)] * num_workers)


def planned(hardware: Hardware, num_workers: int, slo: Slo) -> Shape:
    """What the planner steers; it begins colocated."""
    return replace(colocated(hardware, num_workers, slo), is_planned=True)


def families(hardware: Hardware, num_workers: int, slo: Slo) -> dict[str, dict[str, Shape]]:
    """By contender: its shapes, the best of which counts."""
    return {
        "static split": splits(hardware, num_workers, slo),
        "chunked": {
            f"chunks of {chunk}": chunked(num_workers, chunk, least_loaded) for chunk in CHUNKS
        },
        "cache-aware": {
            f"chunks of {chunk}": chunked(num_workers, chunk, cache_aware) for chunk in CHUNKS
        },
        "colocated, targets": {"": colocated(hardware, num_workers, slo)},
        "planned": {"": planned(hardware, num_workers, slo)},
    }
