"""The Grafana board against services that run: no panel may be empty, and vLLM's names must be
there."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.client import AsyncClient, SamplingParams
from tests.support.live_tiers import ONLY_DECODES, decode_worker, gateway, prefill_worker
from tests.support.metrics_page import fetch_metrics, free_ports
from tests.support.promql import Scrape, evaluate, has_data, scrape

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
BOARD = GRAFANA / "dashboards" / "baton.json"
ALERTS = GRAFANA.parent / "otel" / "alerts.yaml"
AUTOSCALING = ALERTS.parents[1] / "helm" / "baton" / "templates" / "autoscaling.yaml"
WORKERS = ("decode", "prefill")

#: Metrics that vLLM's own example board asks for, and that have a meaning here.
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
}


def expressions() -> Iterator[tuple[str, str]]:
    """(title, PromQL) of each query of each panel."""
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def alerts() -> list[str]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def scaling_queries() -> list[str]:
    """The queries of the chart's KEDA triggers, without the labels of a release's pods."""
    queries = re.findall(r'printf "(sum\(.*?\))" \$pods', AUTOSCALING.read_text())
    assert len(queries) == 3
    return [re.sub(r",?%s", "", query).replace(r"\"", '"') for query in queries]


async def _load(client: AsyncClient, first: int) -> None:
    """Handoffs with and without a known prefix, and more sequences than fit at once."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [[first + index, *range(40)] for index in range(8)]
    await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
    await asyncio.gather(*(client.generate([*prompt, 7], params) for prompt in prompts))


@pytest.fixture(scope="module")
def scrapes() -> tuple[Scrape, Scrape]:
    return asyncio.run(_scrapes())


async def _scrapes() -> tuple[Scrape, Scrape]:
    """Two moments of a system under load, between which it was under load."""
    ports = free_ports(4)

    async def pages() -> Scrape:
        at_s = time.monotonic()
        return scrape(at_s, {str(port): await fetch_metrics(port) for port in ports})

    compat: dict[str, Any] = {"metrics_compat": "vllm"}
    # No prompt is computed where it decodes, however short, so that KV is sent; and steps take so
    # long that sequences meet in the pool, and some are preempted.
    tight = {
        "oracle_step_ms": 10.0,
        "num_gpu_blocks_override": 40,
        "max_model_len": 150,
        "swap_space": 0.0,
        **ONLY_DECODES,
    }
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(prefill_worker(worker_id="p0", metrics_port=ports[0], **compat))
        decodes = [
            await enter(
                decode_worker(worker_id=f"d{i}", metrics_port=ports[1 + i], **compat, **tight)
            )
            for i in range(2)
        ]
        address = await enter(gateway([prefill], decodes, metrics_port=ports[3], **compat))
        client = await enter(AsyncClient(address, max_retries=0))
        await _load(client, 100)
        old = await pages()
        await _load(client, 200)
        return old, await pages()


@pytest.mark.slow
@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_each_query_of_the_board_returns_data(
    scrapes: tuple[Scrape, Scrape], title: str, expression: str
) -> None:
    # A query for failures by reason is drawn as zeros, not as an empty panel, when nothing failed.
    assert has_data(evaluate(expression, *scrapes)), title


@pytest.mark.slow
@pytest.mark.parametrize("expression", alerts())
def test_each_alert_asks_for_what_there_is_and_is_silent(
    scrapes: tuple[Scrape, Scrape], expression: str
) -> None:
    left, _, limit = expression.rpartition(" > ")
    value = evaluate(left, *scrapes)
    assert has_data(value)
    assert all(number <= float(limit) for number in value.values())


@pytest.mark.slow
@pytest.mark.parametrize("query", scaling_queries())
def test_each_query_that_scales_a_tier_is_one_number(
    scrapes: tuple[Scrape, Scrape], query: str
) -> None:
    value = evaluate(query, *scrapes)
    assert len(value) == 1
    assert has_data(value)


def test_the_boards_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & own, panel["title"]
        cells |= own


@pytest.mark.slow
def test_an_unknown_metric_would_be_an_empty_panel(scrapes: tuple[Scrape, Scrape]) -> None:
    assert not has_data(evaluate("sum(rate(baton_renamed_total[1]))", *scrapes))
    assert not has_data(evaluate("histogram_quantile(0.5, sum by (le) (nothing))", *scrapes))


@pytest.mark.slow
def test_vllms_names_are_there_and_agree(scrapes: tuple[Scrape, Scrape]) -> None:
    new = scrapes[1]
    assert {name for name, _ in new.samples} >= VLLM_NAMES
    for ours, theirs in (
        (
            'sum(baton_tokens_total{gen_ai_token_type="output"})',
            "sum(vllm:generation_tokens_total)",
        ),
        (
            "sum(gen_ai_server_time_to_first_token_seconds_count)",
            "sum(vllm:time_to_first_token_seconds_count)",
        ),
        ("sum(baton_preemptions_total)", "sum(vllm:num_preemptions_total)"),
    ):
        assert evaluate(ours, *scrapes) == evaluate(theirs, *scrapes)
        assert list(evaluate(ours, *scrapes).values()) != [0.0]


@pytest.mark.slow
def test_the_parts_of_the_first_token_add_up_in_the_histograms(
    scrapes: tuple[Scrape, Scrape],
) -> None:
    parts = evaluate("sum(baton_ttft_phase_seconds_sum)", *scrapes)
    whole = evaluate("sum(gen_ai_server_time_to_first_token_seconds_sum)", *scrapes)
    (part_s,), (whole_s,) = parts.values(), whole.values()
    assert math.isclose(part_s, whole_s, rel_tol=1e-6)
    phases = {
        dict(key)["baton_phase"]
        for key in evaluate("sum by (baton_phase) (baton_ttft_phase_seconds_count)", *scrapes)
    }
    assert phases == {"queue", "tokenize", "reserve", "prefill", "transfer_exposed", "first_step"}


@pytest.mark.slow
def test_blocks_are_never_orphaned(scrapes: tuple[Scrape, Scrape]) -> None:
    orphaned = evaluate("sum(baton_kv_orphan_blocks)", *scrapes)
    assert list(orphaned.values()) == [0.0]
