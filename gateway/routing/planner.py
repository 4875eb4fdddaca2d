"""Which workers of a fleet a sequence goes to: the router's choice among a few of them. Pure:
reads, changes nothing.

Comparing all of a thousand workers for each sequence costs more than it gains. A few drawn at
random are nearly as good a choice as all, and several gateways that know the same loads do not all
run to the same worker. To the few belong those that probably have the prompt's beginning. Only when
none of them will do are all looked at.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from baton.types import NumericsClass, Tier
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.router import Need, Plan, Verdict, choose

#: Workers of a tier that are drawn at random.
NUM_DRAWN = 12


def plan(need: Need, fleet: Fleet, matched: Mapping[str, int], key: bytes) -> Plan | Verdict:
    """Place one sequence among the fleet's ready workers.

    matched: by address, leading tokens that a worker probably has. key: decides what chance
    decides.
    """
    prefills = _of_class(fleet.ready(Tier.PREFILL), need.numerics)
    decodes = _of_class(fleet.ready(Tier.DECODE), need.numerics)
    some_prefills = _some(prefills, fleet, Tier.PREFILL, matched, key)
    some_decodes = _some(decodes, fleet, Tier.DECODE, matched, key)
    choice = _choose(need, fleet, some_prefills, some_decodes, matched, key)
    is_all = some_prefills is prefills and some_decodes is decodes
    if is_all or (isinstance(choice, Plan) and _is_good(choice, need, fleet)):
        return choice
    return _choose(need, fleet, prefills, decodes, matched, key)


def _of_class(workers: Sequence[Worker], numerics: NumericsClass | None) -> Sequence[Worker]:
    """Those that round so; all, if that does not matter."""
    if numerics is None:
        return workers
    return tuple(w for w in workers if w.info is not None and w.info.numerics == numerics)


def _is_good(choice: Plan, need: Need, fleet: Fleet) -> bool:
    """Whether all workers together could be no better in kind: none to avoid, and the prompt
    computed where it should."""
    if {choice.prefill, choice.decode} & need.avoid:
        return False
    if choice.prefill is not None or not fleet.ready(Tier.PREFILL):
        return True
    threshold = fleet.workers[choice.decode].load.local_prefill_threshold if choice.decode else 0
    return need.num_tokens <= threshold


def _some(
    ready: Sequence[Worker], fleet: Fleet, tier: Tier, matched: Mapping[str, int], key: bytes
) -> Sequence[Worker]:
    if len(ready) <= NUM_DRAWN:
        return ready
    drawn = random.Random(key + bytes((tier,))).sample(ready, NUM_DRAWN)
    some = {worker.address: worker for worker in drawn}
    for address in matched:
        worker = fleet.workers.get(address)
        if worker is not None and worker.can(tier) and worker.is_ready:
            some[address] = worker
    return tuple(some.values())


def _choose(
    need: Need,
    fleet: Fleet,
    prefills: Sequence[Worker],
    decodes: Sequence[Worker],
    matched: Mapping[str, int],
    key: bytes,
) -> Plan | Verdict:
    return choose(
        need,
        [
            worker.prefill_view(
                matched.get(worker.address, 0), fleet.prefill_work.ahead(worker.address)
            )
            for worker in prefills
        ],
        [
            worker.decode_view(matched.get(worker.address, 0), fleet.barred_from(worker.address))
            for worker in decodes
        ],
        key,
    )
