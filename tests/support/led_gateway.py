"""A gateway with a planner that wants what a file says, as a process:

    python -P led_gateway.py FILE --registry=... --planner=on ...

The file has two numbers: of workers, and of those among them that prefill. All else is as it is:
the lease, the record of the number, what is published and when, which roles are ordered. Periods
are short, so that many decisions and terms fit a test.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from baton.config import GatewayOptions
from baton.registry.redis_lease import RedisLease
from baton.service import main
from baton.types import Role
from gateway import server
from gateway.routing.planner import size, steering
from gateway.routing.planner.planner import Planner
from gateway.routing.planner.shapes import Shape, WorkerFacts, roles_in

#: Seconds between two decisions, for which fewer workers have to be enough, and of the lease.
PERIOD_S, SPARE_S, LEASE_S = 0.3, 0.6, 3.0


def write_wanted(path: Path, num_workers: int, num_prefill: int) -> None:
    """Replace the file at once, so that no reader finds half of it."""
    new = path.with_suffix(".new")
    new.write_text(f"{num_workers} {num_prefill}")
    new.replace(path)


def read_wanted(path: Path) -> tuple[int, int]:
    num_workers, num_prefill = map(int, path.read_text().split())
    return num_workers, num_prefill


def lead_by(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let planners of this process want what the file says."""

    def roles(
        planner: Planner, _now_s: float, workers: Sequence[WorkerFacts], _load: object
    ) -> Mapping[str, Role]:
        shape = Shape(min(read_wanted(path)[1], len(workers) - 1))
        planner._shape, planner._num_workers = shape, len(workers)
        return roles_in(shape, workers)

    patch.setattr(Planner, "_roles", roles)
    patch.setattr(Planner, "_needed", lambda *_: read_wanted(path)[0])
    patch.setattr(steering, "PERIOD_S", PERIOD_S)
    patch.setattr(size, "SPARE_S", SPARE_S)
    patch.setattr(size, "_STARTS", 0.0)
    patch.setattr(server, "make_lease", lambda url, model: RedisLease(url, model, lease_s=LEASE_S))


if __name__ == "__main__":
    lead_by(Path(sys.argv.pop(1)), pytest.MonkeyPatch())
    main(GatewayOptions, server.serve_gateway, "gateway")
