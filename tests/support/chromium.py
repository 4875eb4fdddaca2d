"""A headless Chromium, driven over the pipes of its DevTools protocol: messages of JSON, each ended
by a zero byte. No driver and no WebSocket is needed for that.

The protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_MAX_MESSAGE_BYTES = 1 << 26

#: Chromium reads commands from descriptor 3 and writes to 4.
_AS_3_AND_4 = (
    "import os, sys\n"
    "given = [int(text) for text in sys.argv[1:3]]\n"
    "high = [os.dup2(os.dup(fd), 60 + i) for i, fd in enumerate(given)]\n"
    "for fd, goal in zip(high, (3, 4)): os.dup2(fd, goal)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


def chromium_program() -> str | None:
    """Where it is; None if there is none."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


class ScriptFailed(Exception):
    """What a page threw."""


class Tab:
    """One page. problems: what it logged as an error, or threw and did not catch."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        browser.listeners[session] = self._on_event

    def _on_event(self, method: str, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, params, self._session)

    async def open(self, url: str) -> None:
        """Go there; returns when the page's scripts have run."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)})")
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str, *, is_awaited: bool = True) -> Any:
        """What an expression is; if it is a promise and is awaited, what comes of it. Raises
        ScriptFailed."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=is_awaited, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise ScriptFailed(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Until an expression holds; it is looked at with each change of the page's time."""
        while True:
            try:
                await self.run(
                    "new Promise((done) => { const look = () => "
                    f"({condition}) ? done(true) : setTimeout(look, 10); look(); }})"
                )
            except ScriptFailed as failure:
                # The page that was asked is gone: another one is being opened.
                if "destroyed" not in str(failure) and "navigated" not in str(failure):
                    raise
            else:
                return

    async def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """A key of the keyboard, by its name and its Windows code. modifiers: 2 is Ctrl."""
        common = {"key": key, "code": key, "modifiers": modifiers, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown", **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        values = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=values)

    async def screenshot(self) -> bytes:
        """The visible page, as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


class Browser:
    """Belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader = reader
        self._write_fd = write_fd
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.listeners: dict[str, Any] = {}
        """Callbacks of events, by session."""

    async def call(self, method: str, params: Any, session: str = "") -> Any:
        """Raises ScriptFailed with the browser's own error."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write_fd, data) :]
        return await answer

    async def read(self) -> None:
        """Until the browser ends."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" not in message:
                listener = self.listeners.get(message.get("sessionId", ""))
                if listener is not None:
                    listener(message["method"], message["params"])
                continue
            answer = self._answers.pop(message["id"])
            if answer.cancelled():
                continue
            if "error" in message:
                answer.set_exception(ScriptFailed(message["error"]["message"]))
            else:
                answer.set_result(message["result"])

    async def new_tab(self) -> Tab:
        """An empty page, without the cookies and storage of others."""
        context = await self.call("Target.createBrowserContext", {})
        target = await self.call("Target.createTarget", {"url": "about:blank", **context})
        attach = {"targetId": target["targetId"], "flatten": True}
        session = (await self.call("Target.attachToTarget", attach))["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        return tab


@asynccontextmanager
async def running_chromium(program: str, folder: Path) -> AsyncIterator[Browser]:
    """folder: of its profile."""
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    fds = (their_read, their_write)
    command = (sys.executable, "-c", _AS_3_AND_4, *map(str, fds), program, *_FLAGS)
    process = await asyncio.create_subprocess_exec(
        *(*command, f"--user-data-dir={folder}", "about:blank"),
        pass_fds=fds,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    for fd in fds:
        os.close(fd)
    reader = asyncio.StreamReader(limit=_MAX_MESSAGE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_read, "rb")
    )
    browser = Browser(reader, our_write)
    reading = asyncio.create_task(browser.read())
    try:
        yield browser
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        process.kill()
        await process.wait()
        transport.close()
        os.close(our_write)
