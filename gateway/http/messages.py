"""/v1/messages, Anthropic's API: converts each request to a chat, and its output to content
blocks."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any

from pydantic import FailFast, WithJsonSchema

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.chat.style import ChatStyle
from gateway.http.connection import HttpRequest, HttpResponse
from gateway.http.conversation import MAX_ARGUMENTS_CHARS, TEXT_OR_PARTS
from gateway.http.errors import Fills, HttpError, in_words_of, invalid, shown_value
from gateway.http.format import FINISHES, OPENAI, Dialect, Door, Route, send_json
from gateway.http.logprobs import BytesOf
from gateway.http.requests import (
    SEED,
    TOP_K,
    ChoiceSoFar,
    ModelBody,
    NumTokens,
    SloClass,
    TextList,
    json_text,
    refusals,
)
from gateway.http.translated_chat import (
    OF_FORMAT,
    OF_NAME,
    OF_PARAMETERS,
    ChatOutput,
    TranslatedChat,
    response_format,
)
from gateway.intake.rules import MAX_SHOWN, MAX_TOOLS, Violations
from gateway.intake.validator import MAX_MESSAGES

#: Schemas of fields that are parsed here and not by pydantic, for /openapi.json.
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": TEXT_OR_PARTS},
    },
}
_TOOLS = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {
            "name": {"type": "string"},
            "description": {"type": "string"},
            "input_schema": {"type": "object"},
        },
    },
}


class MessagesBody(ModelBody):
    """Fields of a messages request."""

    messages: Annotated[list[Any], WithJsonSchema(_MESSAGES)]
    """The conversation, oldest message first; an assistant's message at its end is continued."""
    max_tokens: NumTokens = None
    """Maximum tokens to produce. Required, except for counting."""
    system: Annotated[Any, WithJsonSchema({"type": ["string", "array"]})] = None
    """Text, or blocks of text."""
    stop_sequences: Annotated[TextList, Fills("stop")] = None
    stream: bool | None = None
    """Stream the output as Anthropic's events."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, WithJsonSchema(TOP_K)] = None
    """Keep the k most probable tokens; 0 and -1 keep all."""
    tools: Annotated[
        list[Any] | None,
        WithJsonSchema(_TOOLS),
        *(Fills(f"tools[].{path}", "[].input_schema") for path in OF_PARAMETERS),
    ] = None
    """Functions that the model may call; none is run here."""
    tool_choice: Annotated[dict[str, Any] | None, OF_NAME] = None
    """Type auto, any, none, or tool with its name."""
    seed: Annotated[int | None, WithJsonSchema(SEED)] = None
    """Same seed, same request, same tokens. Drawn by the server if not given."""
    return_token_ids: bool | None = None
    """Emit `baton.progress` after the events of each piece; it allows resuming the stream."""
    resume_from: Annotated[list[ChoiceSoFar] | None, FailFast()] = None
    """Output of an interrupted stream of the same request; this one continues after it. Needs
    seed."""
    slo_class: SloClass = None
    """Class of requests, with latency targets of its own; default: that of the API key, if it has
    one."""
    thinking: dict[str, Any] | None = None
    """Whether the model reasons first: type enabled or disabled."""
    output_config: Annotated[dict[str, Any] | None, *OF_FORMAT] = None
    """format: JSON Schema of the output. effort: variable of the chat template."""

    refused = ("container", "mcp_servers")
    ignored = (
        "context_management",  # omits old tool results; here all are read
        *("metadata", "service_tier", "inference_geo", "cache_control"),
        *("user_profile_id", "workspace_id"),
    )


#: Error types by status; others are invalid_request_error (4xx) or api_error (5xx).
_ERROR_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def _error(error: HttpError) -> HttpError:
    """Convert an error to this API's form."""
    is_ours = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _ERROR_TYPES.get(error.status, "api_error" if is_ours else "invalid_request_error")
    body = {
        "type": "error",
        "error": {"type": kind, "message": error.body["error"]["message"]},
        "request_id": error.request_id or None,
    }
    return HttpError(error.status, body, error.headers, error.request_id)


ANTHROPIC = Dialect(
    "/v1/messages",
    (*OPENAI.id_headers, "request-id"),
    _error,
    key_header="x-api-key",
    error_event="event: error\n",
)


class MessagesFormat(TranslatedChat):
    """Message requests and answers (format.Format)."""

    id_prefix = "msg_"
    dialect = ANTHROPIC

    def __init__(
        self, body: MessagesBody, bytes_of: BytesOf, style: ChatStyle, *, is_counted: bool = False
    ) -> None:
        """is_counted: only the prompt's tokens are requested. Raises InvalidRequest with this API's
        field names."""
        conversation = _Conversation(body)
        violations = list(islice(_violations(body, is_counted=is_counted), MAX_SHOWN))
        violations += conversation.violations
        if violations:
            raise InvalidRequest.of(*violations[:MAX_SHOWN])
        fields = _chat_fields(body, conversation.messages)
        super().__init__(body, fields, conversation.paths, bytes_of, style)
        self._blocks = _Blocks()

    @property
    def output(self) -> ChatOutput:
        return self._blocks

    def begin_stream(self) -> None:
        used = {"input_tokens": len(self.prompt_token_ids), "output_tokens": 0}
        self._blocks.emit("message_start", message=self._message(used))

    def end(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        self._blocks.emit("message_delta", delta=self._stop(), usage=_usage(usage), **metrics)
        self._blocks.emit("message_stop")
        return self._blocks.take_events()

    def whole(self, usage: Mapping[str, Any]) -> Any:
        message = self._message(_usage(usage))
        return {**message, "content": self._blocks.blocks, **self._stop()}

    def _message(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The message without content."""
        answer = self.answer
        return {
            "id": answer.id if answer else "",
            "type": "message",
            "role": "assistant",
            "model": answer.model if answer else "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        last = self.last
        cause = last.stop_cause if last else None
        sequence = cause.stop if cause and cause.WhichOneof("kind") == "stop" else None
        if last and FINISHES[last.finish_reason] == "length":
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._blocks.blocks):
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}


class _Blocks(ChatOutput):
    """Content blocks and their events."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[dict[str, Any]] = []
        """Content blocks; the last may be open."""
        self._is_open = False
        self._text = ""
        """Text of the open block."""

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add a chat delta."""
        if "reasoning_content" in delta:
            self._ensure({"type": "thinking", "thinking": "", "signature": ""})
            self._extend("thinking_delta", "thinking", delta["reasoning_content"])
        if "content" in delta:
            self._ensure({"type": "text", "text": ""})
            self._extend("text_delta", "text", delta["content"])
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                self._begin({**block, "input": {}})
            if function["arguments"]:
                self._extend("input_json_delta", "partial_json", function["arguments"])

    def close(self) -> None:
        """Close the open block."""
        if not self._is_open:
            return
        block = self.blocks[-1]
        match block["type"]:
            case "tool_use":
                block["input"] = _arguments(self._text)
            case kind:
                block[kind] = self._text
        self.emit("content_block_stop", index=len(self.blocks) - 1)
        self._is_open, self._text = False, ""

    def _ensure(self, block: dict[str, Any]) -> None:
        if not self._is_open or self.blocks[-1]["type"] != block["type"]:
            self._begin(block)

    def _begin(self, block: dict[str, Any]) -> None:
        self.close()
        self.blocks.append(block)
        self._is_open = True
        self.emit("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _extend(self, kind: str, field: str, text: str) -> None:
        self._text += text
        delta = {"type": kind, field: text}
        self.emit("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def _arguments(text: str) -> Any:
    """Parse a call's arguments; empty if the output ended before the call did."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _usage(usage: Mapping[str, Any]) -> Mapping[str, Any]:
    cached = min(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


# Requests


def _violations(body: MessagesBody, *, is_counted: bool) -> Violations:
    if body.max_tokens is None and not is_counted:
        yield FieldViolation("max_tokens", "is missing; give it")
    yield from refusals(body)
    yield from _tool_violations(body.tools or ())
    config, thinking = body.output_config or {}, body.thinking or {}
    asked, effort, kind = config.get("format"), config.get("effort"), thinking.get("type")
    if not isinstance(asked, dict | None):
        yield FieldViolation("output_config.format", f"{shown_value(asked)}: must be an object")
    if not isinstance(effort, str | None):
        yield FieldViolation("output_config.effort", f"{shown_value(effort)}: must be text")
    if not isinstance(kind, str | None):
        yield FieldViolation("thinking.type", f"{shown_value(kind)}: must be text")
    match body.tool_choice:
        case None | {"type": "auto" | "any" | "none"} | {"type": "tool", "name": str()}:
            return
    fault = 'must be of type auto, any or none, or of type tool, with its "name"'
    yield FieldViolation("tool_choice", f"{shown_value(body.tool_choice)}: {fault}")


def _tool_violations(tools: Sequence[Any]) -> Violations:
    if len(tools) > MAX_TOOLS:
        yield FieldViolation("tools", f"{len(tools)} tools: give at most {MAX_TOOLS}")
        return
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            yield FieldViolation(path, f"{shown_value(tool)}: must be a tool, with a name")
            continue
        if tool.get("type") not in (None, "custom"):
            fault = f"{shown_value(tool['type'])}: no tools are run here; give your own"
            yield FieldViolation(f"{path}.type", fault)
        if not isinstance(tool.get("input_schema"), dict):
            fault = f"{shown_value(tool.get('input_schema'))}: must be a JSON Schema, an object"
            yield FieldViolation(f"{path}.input_schema", fault)
        if not isinstance(tool.get("description"), str | None):
            fault = f"{shown_value(tool['description'])}: must be text"
            yield FieldViolation(f"{path}.description", fault)


def _chat_fields(body: MessagesBody, messages: list[Any]) -> Mapping[str, Any]:
    """Convert to the fields of a chat, after `_violations` has passed."""
    choice = body.tool_choice or {}
    is_parallel = not choice.get("disable_parallel_tool_use")
    config, thinking = body.output_config or {}, (body.thinking or {}).get("type")
    is_continued = bool(messages) and messages[-1].get("role") == "assistant"
    return {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": is_parallel,
        "response_format": response_format(config.get("format")),
        "reasoning_effort": config.get("effort"),
        "chat_template_kwargs": thinking and {"enable_thinking": thinking != "disabled"},
        "continue_final_message": is_continued,
        "seed": body.seed,
        "slo_class": body.slo_class,
        "return_token_ids": body.return_token_ids,
        "resume_from": body.resume_from,
    }


def _tool(tool: Mapping[str, Any]) -> Any:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    match choice.get("type"):
        case "tool":
            return {"type": "function", "function": {"name": choice["name"]}}
        case "any":
            return "required"
        case kind:
            return kind


class _Conversation:
    """Converts messages to a chat's: `system` becomes the first message, and each tool result a
    message of its own."""

    def __init__(self, body: MessagesBody) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        """Field path of each message."""
        self.violations: list[FieldViolation] = []
        if body.system:
            self._add("system", {"role": "system", "content": self._text("system", body.system)})
        if len(body.messages) > MAX_MESSAGES:
            raise _too_many_messages()
        for index, message in enumerate(body.messages):
            self._read(f"messages[{index}]", message)

    def _read(self, path: str, message: Any) -> None:
        match message:
            case {"role": "user" | "assistant" as role, "content": str() as text}:
                self._add(path, {"role": role, "content": text})
            case {"role": "system", "content": str() | list() as text}:
                content = self._text(f"{path}.content", text)
                self._add(path, {"role": "system", "content": content})
            case {"role": "user", "content": list() as blocks}:
                self._read_user(path, blocks)
            case {"role": "assistant", "content": list() as blocks}:
                self._read_assistant(path, blocks)
            case {"role": "user" | "assistant" | "system"}:
                fault = f"{shown_value(message.get('content'))}: must be text, or a list of blocks"
                self._refuse(f"{path}.content", fault)
            case dict():
                fault = f"{shown_value(message.get('role'))}: must be user, assistant or system"
                self._refuse(f"{path}.role", fault)
            case _:
                self._refuse(path, f"{shown_value(message)}: must be an object")

    def _read_user(self, path: str, blocks: Sequence[Any]) -> None:
        texts: list[str] = []
        for index, block in enumerate(blocks):
            where = f"{path}.content[{index}]"
            match block:
                case {"type": "text", "text": str() as text}:
                    texts.append(text)
                case {"type": "tool_result", "tool_use_id": str() as call_id}:
                    content = self._text(f"{where}.content", block.get("content") or "")
                    answer = {"role": "tool", "tool_call_id": call_id, "content": content}
                    self._add(path, answer)
                case _:
                    self._refuse_block(where, block, "text or tool_result")
        if texts:
            self._add(path, {"role": "user", "content": "\n".join(texts)})

    def _read_assistant(self, path: str, blocks: Sequence[Any]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Any] = []
        for index, block in enumerate(blocks):
            match block:
                case {"type": "text", "text": str() as text}:
                    texts.append(text)
                case {"type": "tool_use", "id": str() as call_id, "name": str() as name}:
                    where, given = f"{path}.content[{index}].input", block.get("input") or {}
                    arguments = json_text(where, given, MAX_ARGUMENTS_CHARS)
                    function = {"name": name, "arguments": arguments}
                    calls.append({"id": call_id, "type": "function", "function": function})
                case {"type": "thinking", "thinking": str() as text}:
                    thoughts.append(text)
                case {"type": "thinking" | "redacted_thinking"}:
                    pass
                case _:
                    self._refuse_block(f"{path}.content[{index}]", block, "text or tool_use")
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        self._add(path, {**message, "tool_calls": calls} if calls else message)

    def _text(self, path: str, value: Any) -> str:
        """The text of a string or of text blocks."""
        if isinstance(value, str):
            return value
        texts: list[str] = []
        for index, block in enumerate(value if isinstance(value, list) else [value]):
            match block:
                case {"type": "text", "text": str() as text}:
                    texts.append(text)
                case _:
                    self._refuse_block(f"{path}[{index}]", block, "text")
        return "\n".join(texts)

    def _add(self, path: str, message: dict[str, Any]) -> None:
        if len(self.messages) == MAX_MESSAGES:
            raise _too_many_messages()
        self.messages.append(message)
        self.paths.append(path)

    def _refuse_block(self, path: str, block: Any, kinds: str) -> None:
        kind = block.get("type") if isinstance(block, dict) else block
        self._refuse(f"{path}.type", f"{shown_value(kind)}: must be a block of {kinds}")

    def _refuse(self, path: str, fault: str) -> None:
        """Record a violation. Raises InvalidRequest at MAX_SHOWN."""
        self.violations.append(FieldViolation(path, fault))
        if len(self.violations) == MAX_SHOWN:
            raise InvalidRequest.of(*self.violations)


def _too_many_messages() -> InvalidRequest:
    return invalid("messages", f"give at most {MAX_MESSAGES} messages, results of tools among them")


async def _count_tokens(door: Door, request: HttpRequest, response: HttpResponse) -> None:
    body = await door.parsed(MessagesBody, request, response)
    serving, form = door.form(functools.partial(MessagesFormat, is_counted=True), body)
    (asked,) = form.requests
    tokenize = inference_pb2.TokenizeRequest(model=asked.model, prompt=asked.prompt)
    with in_words_of(form.field_names):
        token_ids = await serving.tokenize(tokenize)
    await send_json({"input_tokens": len(token_ids)}, request, response, ANTHROPIC)


ROUTES = (
    Route(
        ANTHROPIC.prefix,
        "post",
        "Anthropic's form of a chat. Errors have Anthropic's form, too.",
        MessagesBody,
        make=MessagesFormat,
        dialect=ANTHROPIC,
    ),
    Route(
        f"{ANTHROPIC.prefix}/count_tokens",
        "post",
        "Tokens of the same prompt, counted.",
        MessagesBody,
        handle=_count_tokens,
        dialect=ANTHROPIC,
    ),
)
