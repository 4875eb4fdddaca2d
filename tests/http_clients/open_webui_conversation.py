"""A conversation with a call of a tool through Open WebUI: its backend as it is published, started
here with a folder of its own, which lists Baton's models and passes on what its users say.
Argument: the base URL of Baton's API."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weather import WEATHER

START_S = 300


class Backend:
    """Open WebUI's own API, as its page uses it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = ""

    def is_up(self) -> bool:
        try:
            return bool(self.ask("/health")["status"])
        except urllib.error.URLError:
            return False

    def sign_in(self) -> None:
        """As the only user there is, without a password: WEBUI_AUTH is off."""
        user = self.ask("/api/v1/auths/signin", {"email": "", "password": ""})
        self._token = user["token"]

    def ask(self, path: str, body: Any = None) -> Any:
        with self._open(path, body) as response:
            return json.load(response)

    def stream(self, body: Any) -> Iterator[Any]:
        """The events of an answer."""
        with self._open("/api/chat/completions", {**body, "stream": True}) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)

    def _open(self, path: str, body: Any) -> Any:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self._url + path, data, headers))


@contextmanager
def open_webui(baton: str, folder: Path) -> Iterator[Backend]:
    """Signed in."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "OPENAI_API_BASE_URLS": baton,
        "OPENAI_API_KEYS": "none",
        "ENABLE_OLLAMA_API": "false",
        "DATA_DIR": str(folder),
        "STATIC_DIR": str(folder / "static"),
        "FROM_INIT_PY": "true",
        "USE_SLIM_DOCKER": "true",  # as installed: without models of its own, and torch
        "OFFLINE_MODE": "true",
        "WEBUI_AUTH": "false",
        "WEBUI_SECRET_KEY": "of this test",
    }
    command = [sys.executable, "-m", "uvicorn", "open_webui.main:app", f"--port={port}"]
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        try:
            backend = Backend(f"http://127.0.0.1:{port}")
            deadline_s = time.monotonic() + START_S
            while not backend.is_up():
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.5)
            backend.sign_in()
            yield backend
        finally:
            process.kill()


def message_of(events: Iterator[Any]) -> tuple[str, list[Any]]:
    """The text and the calls that the events add up to."""
    text, calls = "", list[Any]()
    for event in events:
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or []:
                if piece["index"] == len(calls):
                    calls.append(piece)
                else:
                    function = calls[piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
    return text, calls


def converse(backend: Backend) -> None:
    (model,) = backend.ask("/api/models")["data"]
    question = {"role": "user", "content": "How is the weather in Paris?"}
    common = {"model": model["id"], "temperature": 0, "max_tokens": 64, "messages": [question]}
    tools = {"tools": [WEATHER], "tool_choice": "required"}
    whole = backend.ask("/api/chat/completions", {**common, **tools})
    _, calls = message_of(backend.stream({**common, **tools}))
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    told = whole["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [call["function"] for call in told]
    for call in calls:
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    text, more = message_of(backend.stream({**common, "messages": [question, said, *answers]}))
    assert text
    assert not more


with (
    tempfile.TemporaryDirectory() as folder,
    open_webui(sys.argv[1], Path(folder)) as backend,
):
    converse(backend)
