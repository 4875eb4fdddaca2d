"""A small server of OpenAI's completions and chats that answers by hashes, with one fault at a
time."""

from __future__ import annotations

import hashlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: After so many pieces all clients that break off have done so.
_MAX_PIECES = 10
#: Time in which another request may come, or a connection be closed.
_WAIT_S = 0.03
VOCABULARY = [f" w{i}" for i in range(50)]


class ScriptedServer(ThreadingHTTPServer):
    """fault: its name, or empty; see Handler."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, fault: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.lock = threading.Condition()
        self.num_running, self.num_broken = 0, 0
        self.asked: dict[str, int] = {}
        self.document: object = None
        """Sent instead of each whole answer, if there is one."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send_json({"data": [{"id": "scripted", "max_model_len": 1024}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        if server.fault == "no chats" and "messages" in body:
            self._send_json({"error": {"message": "not here"}}, 404)
            return
        prompt = str(body.get("prompt") or body["messages"])
        with server.lock:
            server.num_running += 1
            server.asked[prompt] = server.asked.get(prompt, 0) + 1
            server.lock.notify_all()
            if server.fault in ("load", "canary"):
                server.lock.wait_for(lambda: server.num_running > 1, _WAIT_S)
        try:
            choices = [self._words(prompt, body, index) for index in range(body.get("n", 1))]
            if body.get("stream"):
                self._stream(body, prompt, choices)
            else:
                self._send_json(self._answer(body, prompt, choices))
        except OSError:
            with server.lock:
                server.num_broken += 1
        finally:
            with server.lock:
                server.num_running -= 1

    def _words(self, prompt: str, body: Any, index: int) -> list[str]:
        server = self.server
        is_wrong = {
            "load": server.num_running > 1,
            "cancel": server.num_broken > 0,
            "cache": server.asked[prompt] > 1,
            "choices": index == 1,
        }.get(server.fault, False)
        own = index if body["temperature"] else 0
        drawn = [prompt, body.get("seed"), own, is_wrong]
        words = []
        for at in range(body["max_tokens"]):
            digest = hashlib.sha256(repr((drawn, at)).encode()).digest()
            words.append(VOCABULARY[digest[0] % len(VOCABULARY)])
        if "print('" in prompt and server.fault == "canary" and server.num_running > 1:
            others = [
                asked for asked in list(server.asked) if asked != prompt and "print('" in asked
            ]
            words[0] = others[-1].rsplit("'", 3)[1] if others else words[0]
        return words

    def _logprobs(self, words: list[str], body: Any) -> Any:
        if body.get("logprobs") is None:
            return None
        value = 0.5 if self.server.fault == "logprob" else -0.5
        return {
            "tokens": words,
            "token_logprobs": [value] * len(words),
            "top_logprobs": [{word: value} for word in words],
        }

    def _usage(self, prompt: str, choices: list[list[str]]) -> Any:
        completion = sum(map(len, choices)) + 2 * (self.server.fault == "usage")
        num_prompt = len(prompt.split())
        total = num_prompt + completion
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return dict(zip(names, (num_prompt, completion, total), strict=True))

    def _part(self, body: Any, index: int, words: list[str], finish: str | None, kind: str) -> Any:
        text = "".join(words)
        said = {kind: {"content": text}} if "messages" in body else {"text": text}
        logprobs = self._logprobs(words, body)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def _answer(self, body: Any, prompt: str, choices: list[list[str]]) -> Any:
        parts = [self._part(body, i, words, "length", "message") for i, words in enumerate(choices)]
        return self.server.document or {"choices": parts, "usage": self._usage(prompt, choices)}

    def _stream(self, body: Any, prompt: str, choices: list[list[str]]) -> None:
        fault = self.server.fault
        self._begin("text/event-stream")
        for index, words in enumerate(choices):
            pieces = [[word] for word in words]
            if fault == "lost":
                del pieces[2]
            if fault == "doubled":
                pieces.insert(2, pieces[2])
            for number, piece in enumerate(pieces):
                is_last = number == len(pieces) - (2 if fault == "late" else 1)
                finish = "length" if is_last else None
                self._event({"choices": [self._part(body, index, piece, finish, "delta")]})
                if fault == "cancel" and number == _MAX_PIECES:
                    self._expect_open()
        self._event({"choices": [], "usage": self._usage(prompt, choices)})
        if fault != "unended":
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: Any) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()

    def _expect_open(self) -> None:
        """Raises ConnectionError."""
        readable, _, _ = select.select([self.connection], [], [], _WAIT_S)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError

    def _send_json(self, document: Any, status: int = 200) -> None:
        self._begin("application/json", status)
        self.wfile.write(json.dumps(document).encode())

    def _begin(self, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()


@contextmanager
def scripted_server(fault: str = "") -> Iterator[ScriptedServer]:
    with ScriptedServer(fault) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
