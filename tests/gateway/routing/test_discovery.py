"""Prometheus finds the workers by a gateway's page: those that it knows, where their metrics
are."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from baton.types import Tier
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.gauges import DISCOVERY_PATH, scrape_targets
from tests.support.fake_workers import make_info
from tests.support.live_tiers import decode_worker, gateway, prefill_worker
from tests.support.metrics_page import fetch_metrics, free_ports
from tests.support.stub_link import StubLink


def fleet_of(**metrics_ports: int) -> Fleet:
    """Decode workers by name, as far as this is about them: none of them is ever called."""
    fleet = Fleet((), [f"{name}.example:50051" for name in metrics_ports])
    for name, port in metrics_ports.items():
        info = replace(make_info(name, Tier.DECODE), metrics_port=port)
        fleet.join(f"{name}.example:50051", info, StubLink())
    return fleet


def targets(fleet: Fleet) -> list[str]:
    return [target for group in scrape_targets([fleet]) for target in group["targets"]]


def test_a_worker_is_found_once_it_was_reached_and_if_it_has_metrics() -> None:
    fleet = fleet_of(b=9465, a=9464, silent=0)
    fleet.add("unreached.example:50051", Tier.PREFILL)
    assert targets(fleet) == ["a.example:9464", "b.example:9465"]


def test_one_that_is_lost_stays_until_nobody_lists_it() -> None:
    fleet = fleet_of(a=9464)
    fleet.leave("a.example:50051", WorkerState.UNREACHABLE, "lost")
    assert targets(fleet) == ["a.example:9464"]
    fleet.remove("a.example:50051")
    assert targets(fleet) == []


def test_an_address_of_version_six_keeps_its_brackets() -> None:
    fleet = Fleet((), ["[fd00::7]:50051"])
    info = replace(make_info("d", Tier.DECODE), metrics_port=9464)
    fleet.join("[fd00::7]:50051", info, StubLink())
    assert targets(fleet) == ["[fd00::7]:9464"]


@pytest.mark.slow
async def test_the_gateways_metrics_port_lists_workers_whose_pages_are_theirs() -> None:
    ports = free_ports(3)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(prefill_worker(worker_id="p0", metrics_port=ports[0]))
        decode = await enter(decode_worker(worker_id="d0", metrics_port=ports[1]))
        await enter(gateway([prefill], [decode], metrics_port=ports[2]))
        groups = await fetch_json(ports[2], DISCOVERY_PATH)
        found = {group["labels"]["__meta_baton_tier"]: group for group in groups}
        assert found.keys() == {"prefill", "decode"}
        for tier, group in found.items():
            (target,) = group["targets"]
            page = await fetch_metrics(int(target.rpartition(":")[2]))
            assert f'baton_tier="{tier}"' in page
            # Prometheus takes no other form.
            assert all(isinstance(value, str) for value in group["labels"].values())
        assert found["decode"]["labels"]["__meta_baton_worker_id"] == "d0"
        assert 'baton_tier="gateway"' in await fetch_metrics(ports[2])


async def fetch_json(port: int, path: str) -> Any:
    def get() -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
            assert response.headers["Content-Type"] == "application/json"
            return json.loads(response.read())

    return await asyncio.to_thread(get)
