"""Explores the handoff in every order of events, and prints what it saw as a row of a table.

    python -m tests.sim.explore_handoffs [--max-states N] [NAME ...]

Names are those of BOUNDS below; all of them if none is given. A violation ends it with status 1 and
the choices that led there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType

from engine.oracle import OracleLayers
from tests.support.explore import Found
from tests.support.handoff_world import FAULTS, Bounds, explore_handoffs

STATES = OracleLayers(has_states=True)

#: What is explored, by name. A block of the prefill worker's is all it has, so that the second
#: prompt takes that of the first.
BOUNDS: Mapping[str, Bounds] = MappingProxyType(
    {
        "one request": Bounds(1, 6),
        "one request, a cancel": Bounds(1, 6, num_cancels=1),
        "one request, a deadline": Bounds(1, 6, num_ticks=1),
        **{f"one request, {f}": Bounds(1, 6, faults=(f,), num_faults=1) for f in FAULTS},
        "one request, two faults": Bounds(1, 6, faults=FAULTS, num_faults=2),
        "one request with states": Bounds(1, 6, layers=STATES),
        "one request with states, a cancel": Bounds(1, 6, num_cancels=1, layers=STATES),
        "one request with states, a fault": Bounds(
            1, 6, faults=FAULTS, num_faults=1, layers=STATES
        ),
        "two requests": Bounds(2, 6),
        "two requests, room for one": Bounds(2, 3),
        "two requests, a cancel": Bounds(2, 6, num_cancels=1),
        **{f"two requests, {f}": Bounds(2, 6, faults=(f,), num_faults=1) for f in FAULTS},
    }
)


def row(name: str, found: Found, seconds: float) -> str:
    whole = "all" if found.is_whole else "a part"
    return (
        f"| {name} | {found.num_states:,} ({whole}) | {found.num_transitions:,} "
        f"| {found.num_ends:,} | {found.depth} | {seconds:.0f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which bounds; all if not given")
    parser.add_argument("--max-states", type=int, default=0, help="of each; 0 for all there are")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BOUNDS)
    if unknown:
        parser.error(f"no bounds are called {sorted(unknown)}; there are {', '.join(BOUNDS)}")
    for name in arguments.names or BOUNDS:
        begin_s = time.process_time()
        found = explore_handoffs(BOUNDS[name], arguments.max_states)
        print(row(name, found, time.process_time() - begin_s), flush=True)
        if found.failure:
            print(found.failure, *found.trace, sep="\n  ")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
