"""The HTTP application: routes, API keys, request ids, and the one place where failures become
answers."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from baton import __version__
from baton.errors import BatonError, ClientStalled
from baton.rpc.api_key import ApiKeys, refusal
from gateway.chat.style import ChatStyle
from gateway.http import chat, completions, responses
from gateway.http.chat import ChatBody
from gateway.http.completions import CompletionBody
from gateway.http.connection import JSON, HttpRequest, HttpResponse
from gateway.http.docs import DOCS_PATH, OPENAPI_PATH, Docs
from gateway.http.errors import HttpError, from_baton, http_error, in_words_of
from gateway.http.format import (
    OPENAI,
    Dialect,
    Door,
    MakeFormat,
    Route,
    name_answer,
    send_json,
    warn,
)
from gateway.http.generation import Generation
from gateway.http.openapi import OPERATIONS
from gateway.http.page import LIVE_PATH, PAGE_FILES, Page
from gateway.http.requests import GenerationBody, ModelBody
from gateway.http.response_store import ResponseStore
from gateway.http.stored_responses import RESPONSES, Run, StoredResponses
from gateway.serving import Models, Serving, unique_request_id
from gateway.telemetry.recorder import GatewayRecorder

_log = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"

#: Paths that need no API key: health checks, and the page on which a key is entered.
_OPEN = frozenset({"/health", "/ping", "/healthcheck", DOCS_PATH, OPENAPI_PATH, *PAGE_FILES})

_MODELS = "/v1/models/"

#: Allowed `access-control-request-headers`: header names, without line breaks.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,1000}")

#: Paths of OpenAI's API that no model here serves.
_NOT_SERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/batches": "batches",
    "/v1/files": "files",
    "/v1/moderations": "moderations",
    "/v1/images/generations": "images",
    "/v1/audio/speech": "speech",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/fine_tuning/jobs": "fine-tuning",
}

_Handler = Callable[[HttpRequest, HttpResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Probes:
    """Sources of /health and /metrics.

    metrics: the Prometheus page and its content type, for the value of an `accept` header.
    """

    is_serving: Callable[[], bool]
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP application.

    styles: by model name. api_keys: empty serves every client. allowed_origins: of web pages; "*"
    allows all. created_s: creation time of the models, Unix seconds. root_path: prefix that paths
    may have, from a proxy that does not take it off. has_metrics: give answers vLLM's metrics.
    response_store_bytes, response_store_s: bounds of kept answers of /v1/responses; 0 keeps none.
    """

    styles: Mapping[str, ChatStyle]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    created_s: int = 0
    root_path: str = ""
    has_metrics: bool = False
    response_store_bytes: int = 0
    response_store_s: float = 0.0


class HttpApp:
    """Routes requests to handlers (connection.HttpHandler). Belongs to one event loop."""

    def __init__(
        self, models: Models, recorder: GatewayRecorder, probes: Probes, settings: HttpSettings
    ) -> None:
        self._models = models
        self._probes = probes
        styles = {serving: settings.styles[serving.facts.name] for serving in models}
        self._door = Door(models, styles)
        self._dialects = {route.dialect for route in OPERATIONS} - {OPENAI}
        self._api_keys = ApiKeys(settings.api_keys) if settings.api_keys else None
        self._origins = frozenset(settings.allowed_origins)
        self._created_s = settings.created_s
        self._prefix = f"/{settings.root_path.strip('/')}/".replace("//", "/")
        self._has_metrics = settings.has_metrics
        self._num_running = 0
        """Generations in flight."""
        self._stored: StoredResponses | None = None
        if settings.response_store_bytes:
            store = ResponseStore(settings.response_store_bytes, settings.response_store_s)
            self._stored = StoredResponses(
                self._door, self._generate, store, has_owners=bool(settings.api_keys)
            )
        page, docs = Page(models, recorder, time.monotonic), Docs()
        self._routes: Mapping[str, Mapping[str, _Handler]] = {
            **{
                route.path: {route.method.upper(): handler} for route, handler in self._of_formats()
            },
            "/v1/models": {"GET": self._list_models},
            **{path: {"GET": self._health} for path in ("/health", "/ping", "/healthcheck")},
            "/invocations": {"POST": self._invoke},
            "/load": {"GET": self._load},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            **{path: {"GET": docs.send} for path in (DOCS_PATH, OPENAPI_PATH)},
            LIVE_PATH: {"GET": page.live},
            **{path: {"GET": page.file} for path in PAGE_FILES},
        }

    def _of_formats(self) -> Iterator[tuple[Route, _Handler]]:
        for route in OPERATIONS:
            if route is responses.ROUTE and self._stored is not None:
                yield route, self._stored.create
            elif route.make is not None and route.body is not None:
                yield route, functools.partial(self._complete, route.body, route.make)
            elif route.handle is not None:
                yield route, functools.partial(route.handle, self._door)

    def _dialect_of(self, request: HttpRequest) -> Dialect:
        """The dialect with the path's prefix."""
        path = request.path
        return next((each for each in self._dialects if path.startswith(each.prefix)), OPENAI)

    # connection.HttpHandler

    def refusal_of(self, request: HttpRequest) -> HttpError | None:
        request.path = self._path_of(request.path)
        if self._api_keys is None or request.path in _OPEN or request.method == "OPTIONS":
            return None
        dialect = self._dialect_of(request)
        key = request.header(dialect.key_header) if dialect.key_header else ""
        if key and not request.header("authorization"):
            request.headers.append(("authorization", f"Bearer {key}"))
        if self._api_keys.admit(request.headers):
            return None
        error, request_id = from_baton(refusal()), unique_request_id(request.headers)
        headers = (*error.headers, *((name, request_id) for name in dialect.id_headers))
        return dialect.shape(HttpError(error.status, error.body, headers, request_id))

    def _path_of(self, path: str) -> str:
        """The path without the proxy's prefix, and with the /v1 that llama.cpp's clients omit."""
        if path.startswith(self._prefix):
            path = f"/{path.removeprefix(self._prefix)}"
        return f"/v1{path}" if path not in self._routes and f"/v1{path}" in self._routes else path

    async def handle(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer a request, errors included. Sends nothing to a client that has gone."""
        response.headers += self._cors_headers(request)
        try:
            if request.method == "OPTIONS":
                await response.send(HTTPStatus.NO_CONTENT, _TEXT, b"")
                return
            await self._handler_of(request)(request, response)
        except HttpError as error:
            await self._send_error(error, request, response)
        except ClientStalled:
            return  # a client that does not read gets no error either
        except BatonError as error:
            await self._send_error(from_baton(error), request, response)
        except Exception as error:  # noqa: BLE001, the one border where any failure becomes an answer
            await self._send_error(_logged(error, request), request, response)

    async def _send_error(
        self, error: HttpError, request: HttpRequest, response: HttpResponse
    ) -> None:
        """Send an error. In a started stream it is the last event, without [DONE]."""
        dialect = self._dialect_of(request)
        request_id = error.request_id or unique_request_id(request.headers)
        request_id = name_answer(request_id, response, dialect)
        error = dialect.shape(HttpError(error.status, error.body, error.headers, request_id))
        if response.has_started:
            if not response.has_ended:
                event = dialect.error_event.encode()
                await response.end(b"%bdata: %b\n\n" % (event, error.json))
            return
        response.headers += error.headers
        await response.send(error.status, JSON, error.json)

    def _handler_of(self, request: HttpRequest) -> _Handler:
        if request.path.startswith(_MODELS) and request.path != _MODELS:
            methods: Mapping[str, _Handler] = {"GET": self._get_model}
        elif request.path.startswith(RESPONSES) and self._stored is not None:
            methods = self._stored.methods(request.path)
        elif request.path in self._routes:
            methods = self._routes[request.path]
        else:
            raise _unknown_path(request)
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = ", ".join(methods)
            raise http_error(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.path} takes {allowed}, not {request.method}",
                headers=(("allow", allowed),),
            )
        return methods[method]

    def _cors_headers(self, request: HttpRequest) -> Iterator[tuple[str, str]]:
        """Headers that let pages of the allowed origins read the answer."""
        origin = request.header("origin")
        if not origin or not self._origins & {origin, "*"}:
            return
        yield ("access-control-allow-origin", "*" if "*" in self._origins else origin)
        yield ("vary", "origin")
        yield ("access-control-expose-headers", "x-request-id, request-id, retry-after, warning")
        if request.method == "OPTIONS":
            yield ("access-control-allow-methods", "GET, POST, DELETE")
            asked = request.header("access-control-request-headers")
            if _HEADER_NAMES.fullmatch(asked):
                yield ("access-control-allow-headers", asked)
            yield ("access-control-max-age", "600")

    async def _complete(
        self, cls: type[ModelBody], make: MakeFormat, request: HttpRequest, response: HttpResponse
    ) -> None:
        body = await self._door.parsed(cls, request, response)
        await self._generate(body, make, request, response)

    async def _invoke(self, request: HttpRequest, response: HttpResponse) -> None:
        """SageMaker's one path: a chat if the body has messages, else a completion."""

        def class_of(fields: Mapping[str, Any]) -> type[GenerationBody]:
            return CompletionBody if fields.get("messages") is None else ChatBody

        id_fields = CompletionBody.id_fields
        body = await self._door.parsed_as(class_of, id_fields, request, response)
        route = chat.ROUTE if isinstance(body, ChatBody) else completions.ROUTE
        if route.make is not None:
            await self._generate(body, route.make, request, response)

    async def _generate(
        self,
        body: ModelBody,
        make: MakeFormat,
        request: HttpRequest,
        response: HttpResponse,
        run: Run = Generation.run,
    ) -> None:
        serving, form = self._door.form(make, body)
        if form.warning:
            warn(form.warning, response)
        self._num_running += 1
        try:
            with in_words_of(form.field_names):
                generation = Generation(
                    serving, form, request, response, has_metrics=self._has_metrics
                )
                await run(generation)
        finally:
            self._num_running -= 1

    @property
    def background(self) -> Collection[asyncio.Task[None]]:
        return () if self._stored is None else self._stored.running

    # The gateway itself

    async def _list_models(self, request: HttpRequest, response: HttpResponse) -> None:
        models = [
            self._model(name, serving)
            for serving in self._models
            for name in (*serving.facts.names, *serving.facts.adapters)
        ]
        await send_json({"object": "list", "data": models}, request, response)

    async def _get_model(self, request: HttpRequest, response: HttpResponse) -> None:
        name = unquote(request.path.removeprefix(_MODELS))
        await send_json(self._model(name, self._models.of(name)), request, response)

    def _model(self, name: str, serving: Serving) -> dict[str, Any]:
        facts = serving.facts
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "baton",
            "root": facts.name,
            "parent": facts.name if name in facts.adapters else None,
            "max_model_len": facts.max_model_len,
        }

    async def _health(self, request: HttpRequest, response: HttpResponse) -> None:  # noqa: ARG002
        is_serving = self._probes.is_serving()
        status = HTTPStatus.OK if is_serving else HTTPStatus.SERVICE_UNAVAILABLE
        await response.send(status, _TEXT, b"")

    async def _load(self, request: HttpRequest, response: HttpResponse) -> None:
        await send_json({"server_load": self._num_running}, request, response)

    async def _version(self, request: HttpRequest, response: HttpResponse) -> None:
        await send_json({"version": __version__}, request, response)

    async def _metrics(self, request: HttpRequest, response: HttpResponse) -> None:
        page, content_type = await self._probes.metrics(request.header("accept"))
        await response.send(HTTPStatus.OK, content_type, page)


def _unknown_path(request: HttpRequest) -> HttpError:
    if request.path in _NOT_SERVED:
        what = _NOT_SERVED[request.path]
        message = f"{what} are not served here: the model writes text; see /v1/models"
    else:
        message = f"unknown URL ({request.method} {request.path[:80]})"
    return http_error(HTTPStatus.NOT_FOUND, message, code="unknown_url")


def _logged(error: Exception, request: HttpRequest) -> HttpError:
    """Log an unexpected error. Log and answer omit its message, which may contain a user's text."""
    request_id = unique_request_id(request.headers)
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error(
        "%s failed: %s\n%s",
        request.path,
        type(error).__name__,
        frames,
        extra={"request_id": request_id},
    )
    message = f"{type(error).__name__}; the server's log has the cause under {request_id}"
    made = http_error(HTTPStatus.INTERNAL_SERVER_ERROR, message)
    return HttpError(made.status, made.body, request_id=request_id)
