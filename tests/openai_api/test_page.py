"""The page at `/`, in a headless Chromium: what it shows of a real server, and who may use it
how."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.config import ServeOptions
from baton.supervisor import Cluster
from gateway.server import serve_gateway
from tests.support.chromium import Browser, Tab, chromium_program, running_chromium
from tests.support.live_tiers import options_of_gateway, reporting
from tests.support.oracle_model import make_oracle_model

MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"
TABS = ("playground", "live", "memory", "code")
PHONE = (360, 740)
PROMPT = "def walk(path):\n    for name in sorted(os.listdir(path)):\n" * 4

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    program = chromium_program()
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    async with running_chromium(program, tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(browser: Browser) -> AsyncIterator[Cluster]:  # noqa: ARG001, else none is needed
    options = ServeOptions(
        model=str(MODEL),
        served_model_name="box",
        port=0,
        kv_cache_memory_bytes=64 << 20,
        max_local_prefill_tokens=16,
        log_level="warning",
        drain_timeout_s=5,
    )
    async with Cluster(options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser, cluster: Cluster) -> AsyncIterator[Tab]:
    opened = await browser.new_tab()
    await opened.resize(1100, 800)
    await opened.open(f"http://{cluster.http_address}/")
    await opened.until("health.textContent === '2 of 2 workers ready'")
    yield opened
    assert opened.problems == []


async def ask(tab: Tab, prompt: str, **fields: Any) -> None:
    """Fill in the form, and send it."""
    for name, value in {"prompt": prompt, "temperature": 0, **fields}.items():
        await tab.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")
    await tab.run("document.getElementById('ask').requestSubmit()")


async def test_a_completion_is_streamed_tinted_and_its_time_split(tab: Tab) -> None:
    await ask(tab, PROMPT, max_tokens=12)
    await tab.until("outcome.textContent.startsWith('Done: the most tokens were reached')")
    output = await tab.run("document.getElementById('output').textContent")
    assert output.startswith(PROMPT)
    tokens = await tab.run(
        "[...document.querySelectorAll('#output .token')].map((t) => [t.className, t.title])"
    )
    assert 1 <= len(tokens) <= 12
    for name, title in tokens:
        percent = float(title.removesuffix(" %"))
        below = sum(percent < bound for bound in (90, 50, 20, 5))
        assert name == f"token p{below}"
    assert await tab.run("document.querySelectorAll('#timing-parts li').length") == 5
    label = await tab.run("document.getElementById('timing-label').textContent")
    parts = await tab.run(
        "[...document.querySelectorAll('#timing-parts li')].map((li) => li.textContent)"
    )
    total = float(label.removeprefix("First token after ").removesuffix(" ms"))
    assert sum(float(part.split()[-2]) for part in parts) == pytest.approx(total, abs=0.5)
    handoff = await tab.run("document.getElementById('timing-handoff').textContent")
    assert handoff.startswith("Handed over from prefill-0 to decode-0: ")


async def test_a_stream_can_be_stopped_and_an_error_is_shown(tab: Tab) -> None:
    # With the first piece: how soon the rest would be there is nobody's to say.
    await tab.run(
        "Writer = class extends Writer { write(...piece) { "
        "super.write(...piece); document.getElementById('cancel').click(); } }; null"
    )
    await ask(tab, "x = ", max_tokens=1500)
    await tab.until("outcome.textContent === 'Stopped.'")
    assert await tab.run("document.querySelectorAll('#output .token').length") < 100
    assert await tab.run("document.getElementById('send').disabled") is False
    await ask(tab, "x", max_tokens=10**8)
    await tab.until("outcome.className === 'bad'")
    assert "max_tokens" in await tab.run("document.getElementById('outcome').textContent")
    tab.problems.clear()  # the browser reports every answer of status 400


async def test_a_conversation_is_kept(tab: Tab) -> None:
    await tab.run("document.querySelector('input[value=chat]').click()")
    for turn in (1, 2):
        await ask(tab, f"Write function {turn}.", max_tokens=6)
        await tab.until("outcome.textContent.startsWith('Done')")
        await tab.run("outcome.textContent = ''")
        roles = await tab.run("conversation.map((message) => message.role)")
        assert roles == ["user", "assistant"] * turn


async def test_the_map_shows_handoffs_a_death_and_the_way_back(tab: Tab, cluster: Cluster) -> None:
    await tab.run("document.getElementById('tab-live').click()")
    await tab.until("document.querySelectorAll('.worker strong').length === 3")
    before = await tab.run("last.handoffs.total")
    await ask(tab, PROMPT[5:], max_tokens=4)
    await tab.until(f"last.handoffs.total > {before}")
    rates = await tab.run("document.getElementById('rates').textContent")
    assert "from prefill-0 to decode-0" in rates
    os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
    await tab.until("cards.get('decode-0')?.element.className === 'worker lost'")
    await tab.until("news.textContent.includes('decode-0: is unreachable')")
    await tab.until("cards.get('decode-0')?.element.className === 'worker ready'")
    assert "decode-0: is ready" in await tab.run("news.textContent")
    await tab.run("document.querySelector('#listing summary').click()")
    await tab.until("document.querySelectorAll('#rows tr').length === 2")


async def test_a_thousand_workers_have_room_on_a_phone(tab: Tab) -> None:
    await tab.resize(*PHONE)
    await tab.run("document.getElementById('tab-live').click()")
    # Nothing of the real workers comes in between.
    await tab.until("!isPolling && (clearTimeout(timer), isPolling = true)")
    for states in (["ready"], ["ready"] * 9 + ["unreachable"]):
        workers = [
            {
                "id": f"{tier}-{i}",
                "tier": tier,
                "state": states[i % len(states)],
                "reason": "",
                "num_running": 1,
                "num_waiting": 0,
                "leased_blocks": i,
                "cached_blocks": 0,
                "num_blocks": 500,
                "kv_tiers": [],
            }
            for tier in ("prefill", "decode")
            for i in range(500)
        ]
        handoffs = {"total": 1, "total_bytes": 9, "last": [[1, "prefill-3", "decode-4", 9]]}
        await tab.run(f"onListing({{...last, workers: {json.dumps(workers)}}})")
    assert await tab.run("document.querySelectorAll('.dense .worker').length") == 1000
    assert await tab.run("document.querySelectorAll('.dense .worker.lost').length") == 100
    assert await tab.run("document.documentElement.scrollWidth") <= PHONE[0]
    # One line for all of them.
    assert "100 workers: is unreachable" in await tab.run("news.textContent")
    listing = f"{{...last, handoffs: {json.dumps({**handoffs, 'total': 10**6})}}}"
    await tab.run(f"last.handoffs.total = 0; onListing({listing})")
    assert await tab.run("document.querySelectorAll('#flights circle').length") == 1


async def test_memory_is_drawn_over_time_and_tiers_are_listed(tab: Tab) -> None:
    await tab.run("document.getElementById('tab-memory').click()")
    await tab.until("!isPolling && (clearTimeout(timer), isPolling = true)")
    kv_tier = {
        "name": "disk",
        "off_reason": "",
        "pays": True,
        "num_bytes": 3 << 20,
        "num_hits": 3,
        "num_misses": 1,
        "num_evictions": 7,
        "saved_ms": 2500,
        "lost_ms": 100,
    }
    slow = {**kv_tier, "name": "store", "pays": False}
    await tab.run("samples.length = 0")
    for leased in (0, 25):
        blocks = {"leased_blocks": leased, "cached_blocks": 50, "num_blocks": 100}
        change = json.dumps({**blocks, "kv_tiers": [kv_tier, slow]})
        workers = f"last.workers.map((worker) => ({{...worker, ...{change}}}))"
        await tab.run("samples.forEach((sample) => { sample.time_ms -= 1000 })")
        await tab.run(f"onMemory({workers})")
    assert await tab.run("document.getElementById('memory-decode-now').textContent") == (
        "25 % of 100 blocks in use, 50 % cached"
    )
    corners = "document.querySelector('#memory-decode .leased').getAttribute('points').split(' ')"
    _, first, last, _ = await tab.run(corners)
    assert first == "0.0,140.0"
    assert last == "600.0,105.0"
    rows = await tab.run(
        "[...document.querySelectorAll('#kv-tier-rows tr')].map((row) => row.textContent)"
    )
    assert rows[2:] == [
        "prefill-0disk3.0 MiB75 %72.5 s0.1 s",
        "prefill-0storeoff: recomputing is faster75 %72.5 s0.1 s",
    ]


async def test_every_view_fits_a_phone_in_the_dark(tab: Tab) -> None:
    light = await tab.run("getComputedStyle(document.body).backgroundColor")
    await tab.prefer(prefers_color_scheme="dark")
    assert await tab.run("getComputedStyle(document.body).backgroundColor") != light
    await tab.resize(*PHONE)
    for name in TABS:
        await tab.run(f"document.getElementById('tab-{name}').click()")
        assert await tab.run("document.documentElement.scrollWidth") <= PHONE[0], name


async def test_it_is_used_by_keyboard_and_all_of_it_has_a_name(tab: Tab) -> None:
    await tab.run("document.getElementById('tab-playground').focus()")
    await tab.press("ArrowRight", 39)
    assert await tab.run("document.activeElement.id") == "tab-live"
    assert await tab.run("document.getElementById('live').hidden") is False
    await tab.press("Home", 36)
    await tab.run("document.getElementById('max_tokens').value = 3")
    await tab.run("document.getElementById('prompt').focus()")
    await tab.press("Enter", 13, modifiers=2)
    await tab.until("outcome.textContent.startsWith('Done')")
    for name in TABS:
        await tab.run(f"document.getElementById('tab-{name}').click()")
        nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "textbox", "spinbutton", "checkbox", "radio", "tab", "tabpanel"}
        roles |= {"log", "table", "region", "tablist", "group"}
        for node in nodes:
            if not node["ignored"] and node["role"]["value"] in roles:
                assert node["name"]["value"] or node["role"]["value"] == "group", node


async def test_the_code_is_of_this_server(tab: Tab, cluster: Cluster) -> None:
    await tab.run("document.getElementById('tab-code').click()")
    texts = await tab.run("[...document.querySelectorAll('pre')].map((pre) => pre.textContent)")
    assert len(texts) == 3
    for text in texts:
        assert f"http://{cluster.http_address}/v1" in text
        assert '"box"' in text


async def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, tmp_path: Path) -> None:
    model = str(make_oracle_model(tmp_path))
    options = options_of_gateway([], [], model=model, api_key="right")
    async with reporting(serve_gateway, options) as report:
        tab = await browser.new_tab()
        await tab.open(f"http://{report.http_address}/")
        for given in ("wrong", "right"):
            await tab.until("document.getElementById('key-dialog').open")
            fault = await tab.run("document.getElementById('key-fault').textContent")
            assert bool(fault) is (given == "right")
            await tab.run(f"document.getElementById('key').value = {given!r}")
            await tab.run("document.querySelector('#key-form button').click()")
        await tab.until("health.textContent === '0 of 0 workers ready'")
        await tab.until("document.querySelector('pre').textContent.includes('Bearer YOUR_KEY')")
        await tab.run("document.getElementById('model').textContent = ''")
        await tab.call("Page.reload")
        await tab.until("document.getElementById('model')?.textContent === 'oracle'")
        assert not await tab.run("document.getElementById('key-dialog').open")
