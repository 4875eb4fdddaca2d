"""What is served by HTTP, and where: routes, keys, the ids of requests, and the border where any
failure becomes an answer."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from baton import __version__
from baton.errors import BatonError, ClientStalled, InvalidRequest
from baton.rpc.api_key import ApiKeys, refusal
from baton.v1 import inference_pb2
from gateway.chat.style import ChatStyle
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.completions import CompletionBody, CompletionFormat
from gateway.http.connection import JSON, HttpRequest, HttpResponse
from gateway.http.docs import DOCS_PATH, OPENAPI_PATH, Docs
from gateway.http.errors import HttpError, from_baton, http_error, in_words_of, names_in
from gateway.http.generation import ID_HEADERS, Format, Generation
from gateway.http.logprobs import BytesOf
from gateway.http.messages import (
    MESSAGES_ID_HEADERS,
    MessagesBody,
    MessagesFormat,
    messages_error,
)
from gateway.http.page import LIVE_PATH, PAGE_FILES, Page
from gateway.http.requests import BodyT, ModelBody, parsed, put_token_ids
from gateway.http.responses import ResponsesBody, ResponsesFormat
from gateway.http.tokens import DetokenizeBody, TokenizeBody, put_tokenized_prompt
from gateway.intake.token_bytes import text_of
from gateway.long_work import in_pieces, let_others_run
from gateway.serving import Models, Serving, unique_request_id
from gateway.telemetry.recorder import GatewayRecorder

_log = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"

#: For whoever asks whether the gateway is well, and the page where a key can be given: they have
#: none.
_OPEN = frozenset({"/health", "/ping", DOCS_PATH, OPENAPI_PATH, *PAGE_FILES})

_MODELS = "/v1/models/"

#: Anthropic's, and what lies below it: with its own form of errors and its own header of keys.
_MESSAGES = "/v1/messages"

#: Of request headers: names, and nothing that could end a line.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,1000}")

#: Token ids that are written in one go, perhaps with their texts.
_IDS_A_PIECE = 8192

_MAX_WARNED = 8
_MAX_WARNED_CHARS = 64

#: What clients of OpenAI's may ask for, and no model here answers.
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

#: What completes, by path: the fields of its body, and what is made of one.
_FORMATS: Mapping[str, tuple[type[ModelBody], Callable[[Any, BytesOf, ChatStyle], Format]]] = {
    "/v1/completions": (CompletionBody, lambda body, bytes_of, _: CompletionFormat(body, bytes_of)),
    "/v1/chat/completions": (ChatBody, ChatFormat),
    "/v1/responses": (ResponsesBody, ResponsesFormat),
    _MESSAGES: (MessagesBody, MessagesFormat),
}


@dataclass(frozen=True, slots=True)
class Probes:
    """What others know of the gateway. metrics: the page of Prometheus and its content type, for an
    `accept` header."""

    is_serving: Callable[[], bool]
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """styles: by the name of each model. api_keys: none at all: every client is served.
    allowed_origins: of web pages; "*" for all. created_s: of the models, since 1970."""

    styles: Mapping[str, ChatStyle]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    created_s: int = 0


class HttpApp:
    """Belongs to one event loop. See connection.HttpHandler."""

    def __init__(
        self, models: Models, recorder: GatewayRecorder, probes: Probes, settings: HttpSettings
    ) -> None:
        self._models = models
        self._probes = probes
        self._styles = {serving: settings.styles[serving.facts.name] for serving in models}
        self._api_keys = ApiKeys(settings.api_keys) if settings.api_keys else None
        self._origins = frozenset(settings.allowed_origins)
        self._created_s = settings.created_s
        page, docs = Page(models, recorder, time.monotonic), Docs()
        self._routes: Mapping[str, Mapping[str, _Handler]] = {
            **{path: {"POST": self._generate} for path in _FORMATS},
            f"{_MESSAGES}/count_tokens": {"POST": self._count_tokens},
            "/v1/models": {"GET": self._list_models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/tokenizer_info": {"GET": self._tokenizer_info},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            **{path: {"GET": docs.send} for path in (DOCS_PATH, OPENAPI_PATH)},
            LIVE_PATH: {"GET": page.live},
            **{path: {"GET": page.file} for path in PAGE_FILES},
        }

    # connection.HttpHandler

    def refusal_of(self, request: HttpRequest) -> HttpError | None:
        if self._api_keys is None or request.path in _OPEN or request.method == "OPTIONS":
            return None
        if request.path.startswith(_MESSAGES):
            _show_key(request)
        if self._api_keys.admit(request.headers):
            return None
        error, request_id = from_baton(refusal()), unique_request_id(request.headers)
        headers = (*error.headers, *_id_headers(request_id, request))
        return _shaped(HttpError(error.status, error.body, headers, request_id), request)

    async def handle(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answers, whatever happens; a client that is gone gets nothing."""
        response.headers += self._cors_headers(request)
        try:
            if request.method == "OPTIONS":
                await response.send(HTTPStatus.NO_CONTENT, _TEXT, b"")
                return
            await self._handler_of(request)(request, response)
        except HttpError as error:
            await _send_error(error, request, response)
        except ClientStalled:
            return  # who does not read gets no more
        except BatonError as error:
            await _send_error(from_baton(error), request, response)
        except Exception as error:  # noqa: BLE001, the one border where any failure becomes an answer
            await _send_error(_logged(error, request), request, response)

    def _handler_of(self, request: HttpRequest) -> _Handler:
        if request.path.startswith(_MODELS) and request.path != _MODELS:
            methods: Mapping[str, _Handler] = {"GET": self._get_model}
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
        """What lets pages of the allowed origins read the answer."""
        origin = request.header("origin")
        if not origin or not self._origins & {origin, "*"}:
            return
        yield ("access-control-allow-origin", "*" if "*" in self._origins else origin)
        yield ("vary", "origin")
        yield ("access-control-expose-headers", "x-request-id, request-id, retry-after, warning")
        if request.method == "OPTIONS":
            yield ("access-control-allow-methods", "GET, POST")
            asked = request.header("access-control-request-headers")
            if _HEADER_NAMES.fullmatch(asked):
                yield ("access-control-allow-headers", asked)
            yield ("access-control-max-age", "600")

    async def _parsed(
        self, cls: type[BodyT], request: HttpRequest, response: HttpResponse
    ) -> BodyT:
        """The body's fields; what nobody knows of them is named in a header of the answer."""
        max_model_len = max(serving.facts.max_model_len for serving in self._models)
        num_bytes = len(request.body)
        body = await parsed(cls, request.body, max_model_len)
        request.body = b""
        await let_others_run(num_bytes)
        if body.unknown_fields:
            names = [name[:_MAX_WARNED_CHARS] for name in body.unknown_fields[:_MAX_WARNED]]
            shown = json.dumps(", ".join(names).replace('"', "").replace("\\", ""))
            warning = f'299 baton {shown[:-1]}: ignored, not known here"'
            response.headers.append(("warning", warning))
        return body

    # Completions

    async def _generate(self, request: HttpRequest, response: HttpResponse) -> None:
        cls, make = _FORMATS[request.path]
        body = await self._parsed(cls, request, response)
        serving = self._models.of(body.model or "")
        form = make(body, serving.tokenizer.bytes_of, self._styles[serving])
        try:
            await Generation(serving, form, request, response).run()
        except InvalidRequest as error:
            raise in_words_of(form.field_names, error) from None

    async def _count_tokens(self, request: HttpRequest, response: HttpResponse) -> None:
        body = await self._parsed(MessagesBody, request, response)
        serving = self._models.of(body.model or "")
        bytes_of = serving.tokenizer.bytes_of
        form = MessagesFormat(body, bytes_of, self._styles[serving], is_counted=True)
        (asked,) = form.requests
        tokenize = inference_pb2.TokenizeRequest(model=asked.model, prompt=asked.prompt)
        try:
            token_ids = await serving.tokenize(tokenize)
        except InvalidRequest as error:
            raise in_words_of(form.field_names, error) from None
        await _send_json({"input_tokens": len(token_ids)}, request, response)

    # Tokens

    async def _tokenize(self, request: HttpRequest, response: HttpResponse) -> None:
        body = await self._parsed(TokenizeBody, request, response)
        serving = self._models.of(body.model or "")
        bytes_of = serving.tokenizer.bytes_of
        asked = inference_pb2.TokenizeRequest(model=body.model or "")
        names = put_tokenized_prompt(body, bytes_of, self._styles[serving], asked.prompt)
        try:
            token_ids = await serving.tokenize(asked)
        except InvalidRequest as error:
            raise in_words_of(names, error) from None
        facts = {"count": len(token_ids), "max_model_len": serving.facts.max_model_len}
        tokens, texts = await _json_list(token_ids, lambda token_id: token_id), "null"
        if body.return_token_strs:
            texts = await _json_list(token_ids, lambda token_id: text_of(bytes_of(token_id)))
        document = f'{json.dumps(facts)[:-1]}, "tokens": {tokens}, "token_strs": {texts}}}'
        await _send_json_text(document, request, response)

    async def _detokenize(self, request: HttpRequest, response: HttpResponse) -> None:
        body = await self._parsed(DetokenizeBody, request, response)
        asked = inference_pb2.DetokenizeRequest(model=body.model or "")
        put_token_ids("tokens", body.tokens, asked.token_ids)
        try:
            text = await self._models.of(asked.model).detokenize(asked)
        except InvalidRequest as error:
            raise in_words_of(names_in(body), error) from None
        await _send_json({"prompt": text}, request, response)

    async def _tokenizer_info(self, request: HttpRequest, response: HttpResponse) -> None:
        """As tokenizer_config.json names it: what renders and counts prompts elsewhere."""
        serving = self._models.of("")
        facts = serving.tokenizer.facts
        document = {
            **facts.special_tokens,
            "chat_template": facts.chat_template,
            "model_max_length": serving.facts.max_model_len,
        }
        await _send_json(document, request, response)

    # The gateway itself

    async def _list_models(self, request: HttpRequest, response: HttpResponse) -> None:
        models = [
            self._model(name, serving)
            for serving in self._models
            for name in (*serving.facts.names, *serving.facts.adapters)
        ]
        await _send_json({"object": "list", "data": models}, request, response)

    async def _get_model(self, request: HttpRequest, response: HttpResponse) -> None:
        name = unquote(request.path.removeprefix(_MODELS))
        await _send_json(self._model(name, self._models.of(name)), request, response)

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

    async def _version(self, request: HttpRequest, response: HttpResponse) -> None:
        await _send_json({"version": __version__}, request, response)

    async def _metrics(self, request: HttpRequest, response: HttpResponse) -> None:
        page, content_type = await self._probes.metrics(request.header("accept"))
        await response.send(HTTPStatus.OK, content_type, page)


def _show_key(request: HttpRequest) -> None:
    """A key in Anthropic's header is one in OpenAI's."""
    key = request.header("x-api-key")
    if key and not request.header("authorization"):
        request.headers.append(("authorization", f"Bearer {key}"))


def _shaped(error: HttpError, request: HttpRequest) -> HttpError:
    """An error as clients of that path read it."""
    return messages_error(error) if request.path.startswith(_MESSAGES) else error


def _unknown_path(request: HttpRequest) -> HttpError:
    if request.path in _NOT_SERVED:
        what = _NOT_SERVED[request.path]
        message = f"{what} are not served here: the model writes text; see /v1/models"
    else:
        message = f"unknown URL ({request.method} {request.path[:80]})"
    return http_error(HTTPStatus.NOT_FOUND, message, code="unknown_url")


def _logged(error: Exception, request: HttpRequest) -> HttpError:
    """A fault of ours. Neither log nor answer repeats its message, which may hold a user's text."""
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


async def _json_list(token_ids: Sequence[int], make: Callable[[int], Any]) -> str:
    """make: what to write of each."""
    written: list[str] = []

    def write(ids: Sequence[int]) -> None:
        written.append(json.dumps([make(token_id) for token_id in ids])[1:-1])

    await in_pieces(token_ids, write, _IDS_A_PIECE)
    return f"[{', '.join(written)}]"


async def _send_json(document: Any, request: HttpRequest, response: HttpResponse) -> None:
    await _send_json_text(json.dumps(document), request, response)


async def _send_json_text(text: str, request: HttpRequest, response: HttpResponse) -> None:
    _name_answer(unique_request_id(request.headers), request, response)
    await response.send(HTTPStatus.OK, JSON, text.encode())


def _name_answer(request_id: str, request: HttpRequest, response: HttpResponse) -> str:
    """Put the request's name into the headers; the one that is there already stays. Returns it."""
    for name, value in response.headers:
        if name == "x-request-id":
            return value
    response.headers += _id_headers(request_id, request)
    return request_id


def _id_headers(request_id: str, request: HttpRequest) -> Iterator[tuple[str, str]]:
    names = MESSAGES_ID_HEADERS if request.path.startswith(_MESSAGES) else ID_HEADERS
    return ((name, request_id) for name in names)


async def _send_error(error: HttpError, request: HttpRequest, response: HttpResponse) -> None:
    """Within a stream that has begun, the error is its last event, and no [DONE] follows."""
    request_id = error.request_id or unique_request_id(request.headers)
    request_id = _name_answer(request_id, request, response)
    error = _shaped(HttpError(error.status, error.body, error.headers, request_id), request)
    if response.has_started:
        if not response.has_ended:
            kind = b"event: error\n" if request.path.startswith(_MESSAGES) else b""
            await response.end(b"%bdata: %b\n\n" % (kind, error.json))
        return
    response.headers += error.headers
    await response.send(error.status, JSON, error.json)
