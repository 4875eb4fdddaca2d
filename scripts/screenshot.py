"""Take the pictures of the page that README shows: docs/page.png, and docs/page-live.png.

    python scripts/screenshot.py

It serves the bundled model with two workers of each kind, and needs Chromium.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from baton.config import ServeOptions
from baton.supervisor import Cluster

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.chromium import Tab, chromium_program, running_chromium  # noqa: E402

_SIZE, _LIVE_SIZE = (1120, 760), (1120, 560)
_PROMPT = '''import os


def find_files(path, suffix):
    """Return the names of the files below path that end with suffix."""
'''
_NUM_LOADS = 8


async def take_pictures() -> None:
    """Raises SystemExit without Chromium."""
    program = chromium_program()
    if program is None:
        raise SystemExit("no Chromium here (Debian: apt-get install chromium)")
    options = ServeOptions(
        model="models/baton-py-6m",
        port=0,
        num_prefill_workers=2,
        num_decode_workers=2,
        kv_cache_memory_bytes=8 << 20,
        max_local_prefill_tokens=16,
        log_level="warning",
    )
    with tempfile.TemporaryDirectory() as profile:
        async with Cluster(options) as cluster, running_chromium(program, Path(profile)) as browser:
            tab = await browser.new_tab()
            await tab.resize(*_SIZE)
            await tab.open(f"http://{cluster.http_address}/")
            await tab.until("health.textContent === '4 of 4 workers ready'")
            await ask(tab)
            await tab.until("outcome.textContent.startsWith('Done')")
            (ROOT / "docs" / "page.png").write_bytes(await tab.screenshot())
            await tab.run("document.getElementById('tab-live').click()")
            await tab.resize(*_LIVE_SIZE)
            await tab.run("document.getElementById('max_tokens').value = 1000")
            for number in range(_NUM_LOADS):
                await tab.run(f"document.getElementById('prompt').value += 'x = {number}\\n' * 40")
                await tab.run("send()", is_awaited=False)
            await tab.until("last.gateway.num_active > 2 && last.handoffs.total > 3")
            await tab.until("document.querySelector('#flights circle')")
            (ROOT / "docs" / "page-live.png").write_bytes(await tab.screenshot())


async def ask(tab: Tab) -> None:
    """Complete the prompt."""
    await tab.run(f"document.getElementById('prompt').value = {_PROMPT!r}")
    await tab.run("document.getElementById('seed').value = 7")
    await tab.run("document.getElementById('ask').requestSubmit()")


if __name__ == "__main__":
    asyncio.run(take_pictures())
