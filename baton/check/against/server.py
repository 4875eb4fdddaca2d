"""Client of one server: plain HTTP requests, so that nothing mends what the server does wrong."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from baton.check.against.answer import Answer, answer_of, assemble
from baton.errors import BatonError
from baton.redaction import redacted

T = TypeVar("T")
Body = Mapping[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_TIMEOUT_S = 300.0
#: A server that is full is asked again so often, after the seconds that it names, or these.
_MAX_RETRIES, _PAUSE_S, _MAX_PAUSE_S = 20, 0.5, 5.0
_FULL = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_MAX_MESSAGE_CHARS = 200


class Refused(BatonError):
    """The server answered with an error, or not at all. status: 0 without an answer."""

    reason = "REFUSED"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_unserved(self) -> bool:
        """Whether the server does not serve such a request, however often it is asked."""
        return self.status // 100 == 4 and self.status not in _FULL


class Server:
    """One model at one address. Used by several threads; each request has a connection."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """url: as http://host:port, with or without /v1. model: the first one served if None.
        Raises Refused."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = _address(self.url)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        lengths = self._lengths()
        if model is None and not lengths:
            raise Refused(f"{self.url}/v1/models names no model; give one with --model")
        self.model = model or next(iter(lengths))
        self.max_model_len = lengths.get(self.model)
        """In tokens; None if the server does not say."""

    def ask(self, path: str, body: Body) -> Answer:
        """A whole answer. Raises Refused."""
        with closing(self._open("POST", path, body)) as response:
            return _read(response, lambda: answer_of(_read_json(response)))

    def stream(self, path: str, body: Body, stop_after: int | None = None) -> Answer:
        """Read a stream; with `stop_after`, break the connection after so many pieces. Raises
        Refused."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with closing(self._open("POST", path, body)) as response:
            events = _events(response, stop_after)
            return _read(response, lambda: assemble(events, is_cut=stop_after is not None))

    def command(self, path: str, body: Body) -> str:
        """A shell command that sends a request. It shows no API key."""
        text = json.dumps({"model": self.model, **body}).replace("'", "'\\''")
        key = " -H 'authorization: Bearer KEY'" if "authorization" in self._headers else ""
        return f"curl {self.url}{path}{key} -H 'content-type: application/json' -d '{text}'"

    def _lengths(self) -> dict[str, int | None]:
        """Maximum tokens of each model served; None if the server does not say."""
        with closing(self._open("GET", "/v1/models", None)) as response:

            def read() -> dict[str, int | None]:
                served = _read_json(response).get("data") or ()
                return {str(each["id"]): each.get("max_model_len") for each in served}

            return _read(response, read)

    def _open(self, method: str, path: str, body: Body | None) -> http.client.HTTPResponse:
        """Send a request; again, if the server is full. The response owns its connection."""
        for attempt in range(_MAX_RETRIES + 1):
            response = self._send(method, path, body)
            if response.status == HTTPStatus.OK:
                return response
            with closing(response):
                if response.status not in _FULL or attempt == _MAX_RETRIES:
                    raise Refused(_message_of(response), response.status)
                after = response.headers.get("retry-after", "")
            time.sleep(min(_MAX_PAUSE_S, float(after) if after.isdecimal() else _PAUSE_S))
        raise AssertionError("the last attempt returns or raises")

    def _send(self, method: str, path: str, body: Body | None) -> http.client.HTTPResponse:
        host, port = self._parts.hostname or "", self._parts.port
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                host, port, timeout=_TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        # http.client then closes the socket with the response.
        headers = {**self._headers, "connection": "close"}
        content = None if body is None else json.dumps({"model": self.model, **body}).encode()
        try:
            connection.request(method, self._parts.path + path, content, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Refused(f"{self.url}{path}: {error or type(error).__name__}") from error


def _address(url: str) -> SplitResult:
    """Raises Refused."""
    fix = "give one as http://127.0.0.1:8000, with --api-key for a key"
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or parts.username is not None:
        raise Refused(f"{redacted(url)!r} is no address of a server; {fix}")
    return parts


def _read(response: http.client.HTTPResponse, read: Callable[[], T]) -> T:
    """What `read` makes of an answer. Raises Refused if it has not the form of OpenAI's API."""
    try:
        return read()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        fault = f"the answer has another form than OpenAI's: {type(error).__name__}: {error}"
        raise Refused(fault, response.status) from error


def _read_json(response: http.client.HTTPResponse) -> Any:
    """Raises Refused, and ValueError without JSON."""
    try:
        return json.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"the answer cannot be read: {error}", response.status) from error


def _events(response: http.client.HTTPResponse, stop_after: int | None) -> Iterator[str]:
    """Data of a stream's events. Raises Refused if the connection breaks."""
    num_events = 0
    try:
        for line in response:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
                num_events += 1
                if num_events == stop_after:
                    return
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"the stream broke off: {error or type(error).__name__}") from error


def _message_of(response: http.client.HTTPResponse) -> str:
    try:
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as cause:
        text = f"the answer cannot be read: {cause}"
    try:
        document = json.loads(text)
    except ValueError:
        document = {}
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{response.status}: {str(message or text)[:_MAX_MESSAGE_CHARS]}"
