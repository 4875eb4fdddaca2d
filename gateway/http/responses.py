"""/v1/responses, stateless: a conversation in, items out. Each request is a chat of chat.py
in another form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.http.chat import MAX_ARGUMENTS_CHARS, ChatBody, ChatChoice, ChatFormat
from gateway.http.chat_style import ChatStyle
from gateway.http.errors import FieldNames, shown_value
from gateway.http.generation import FINISHES, Answer, Chunk, by_choice
from gateway.http.logprobs import BytesOf
from gateway.http.requests import Body, json_text
from gateway.intake.validator import MAX_MESSAGES


class ResponsesBody(Body):
    """What a request may have."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    # Nothing is kept here from one request to the next.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    # Nothing here depends on these.
    store: Any = None
    metadata: Any = None
    include: Any = None
    truncation: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    stream_options: Any = None


#: Of a conversation: its messages, each call of a tool, and each of their answers.
_MAX_ITEMS = 4 * MAX_MESSAGES

_REFUSED = ("previous_response_id", "conversation", "background", "prompt")

#: What chat.py calls a field, and this API.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}


class ResponsesFormat:
    """See generation.Format."""

    id_prefix = "resp"

    def __init__(self, body: ResponsesBody, bytes_of: BytesOf, style: ChatStyle) -> None:
        """Raises InvalidRequest, with this API's names."""
        self._asked = body
        refused = [field for field in _REFUSED if getattr(body, field)]
        if refused:
            fault = "is not served here: nothing is kept; send the whole conversation as input"
            raise InvalidRequest.of(*(FieldViolation(field, fault) for field in refused))
        try:
            self._chat = ChatFormat(_chat_body(body), bytes_of, style)
        except InvalidRequest as error:
            raise InvalidRequest.of(
                *(FieldViolation(_renamed(v.field), v.description) for v in error.violations)
            ) from None
        self._answer: Answer | None = None
        self._choice: ChatChoice | None = None
        self._items = _Items()
        self._finish: str | None = None

    @property
    def body(self) -> ChatBody:
        return self._chat.body

    @property
    def requests(self) -> Sequence[inference_pb2.GenerateRequest]:
        return self._chat.requests

    @property
    def field_names(self) -> FieldNames:
        """What its fields are called in errors."""
        of_chat = self._chat.field_names
        return lambda field: _renamed(of_chat(field))

    def begin(self, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        self._answer = answer
        self._chat.begin(answer, prompt_token_ids)

    def event(self, prompt: int, chunk: Chunk, usage: str) -> str:  # noqa: ARG002
        if self._choice is None:
            self._choice = self._chat.new_choice()
            for kind in ("response.created", "response.in_progress"):
                self._items.emit(kind, response=self._document("in_progress", None))
        is_last = bool(chunk.finish_reason)
        self._items.add(self._choice.delta(chunk.text, is_last=is_last))
        if is_last:
            self._finish = FINISHES[chunk.finish_reason]
            self._items.close()
        return self._items.take_events()

    def end(self, usage: Mapping[str, Any]) -> str:
        document = self._document(self._status, usage)
        self._items.emit(f"response.{self._status}", response=document)
        return self._items.take_events()

    def document(self, chunks: Sequence[Sequence[Chunk]], usage: Mapping[str, Any]) -> Any:
        (pieces,) = by_choice(chunks[0]).values()
        self._finish = FINISHES[pieces[-1].finish_reason]
        text = "".join(chunk.text for chunk in pieces)
        self._items.add(self._chat.new_choice().delta(text, is_last=True))
        self._items.close()
        return self._document(self._status, usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _document(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        asked, answer = self._asked, self._answer
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": answer.id if answer else "",
            "object": "response",
            "created_at": answer.created if answer else 0,
            "status": status,
            "model": answer.model if answer else "",
            "output": list(self._items.items),
            "error": None,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "usage": usage and _usage(usage),
        }


class _Items:
    """The output as it grows, and its events."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """That are whole."""
        self._open: dict[str, Any] | None = None
        self._text = ""
        """Of the open one."""
        self._events: list[str] = []
        self._num_events = 0

    def emit(self, kind: str, **fields: Any) -> None:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events.append(f"event: {kind}\ndata: {json.dumps(data)}\n\n")

    def take_events(self) -> str:
        text = "".join(self._events)
        self._events.clear()
        return text

    def add(self, delta: Mapping[str, Any]) -> None:
        """A delta of a chat."""
        if "reasoning_content" in delta:
            self._add_text("reasoning", "response.reasoning_text", delta["reasoning_content"])
        if "content" in delta:
            self._add_text("message", "response.output_text", delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                self._begin("function_call", "fc", call_id=call["id"], name=name, arguments="")
            arguments = call["function"]["arguments"]
            if arguments:
                self._text += arguments
                self.emit("response.function_call_arguments.delta", **self._where, delta=arguments)

    def close(self) -> None:
        """The open item is whole."""
        item, text = self._open, self._text
        if item is None:
            return
        match item["type"]:
            case "function_call":
                self.emit("response.function_call_arguments.done", **self._where, arguments=text)
                item["arguments"] = text
            case "message":
                self.emit("response.output_text.done", **self._where, **_FIRST, text=text)
                part = {"type": "output_text", "text": text, "annotations": []}
                self.emit("response.content_part.done", **self._where, **_FIRST, part=part)
                item["content"] = [part]
            case _:
                self.emit("response.reasoning_text.done", **self._where, **_FIRST, text=text)
                item["content"] = [{"type": "reasoning_text", "text": text}]
        item["status"] = "completed"
        where = {"output_index": len(self.items)}
        self.emit("response.output_item.done", **where, item=item)
        self.items.append(item)
        self._open, self._text = None, ""

    def _add_text(self, kind: str, event: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            if kind == "message":
                self._begin(kind, "msg", role="assistant", content=[])
                part = {"type": "output_text", "text": "", "annotations": []}
                self.emit("response.content_part.added", **self._where, **_FIRST, part=part)
            else:
                self._begin(kind, "rs", summary=[], content=[])
        self._text += text
        self.emit(f"{event}.delta", **self._where, **_FIRST, delta=text)

    def _begin(self, kind: str, prefix: str, **fields: Any) -> None:
        self.close()
        item_id = f"{prefix}_{secrets.token_hex(12)}"
        self._open = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        where = {"output_index": len(self.items)}
        self.emit("response.output_item.added", **where, item=dict(self._open))

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._open["id"] if self._open else "", "output_index": len(self.items)}


#: Every item has one part.
_FIRST = {"content_index": 0}


def _usage(usage: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _renamed(field: str) -> str:
    for path, name in _NAMES.items():
        if field == path or field.startswith((f"{path}.", f"{path}[")):
            return name + field[len(path) :]
    return field


def _chat_body(body: ResponsesBody) -> ChatBody:
    """The same as a chat."""
    asked, effort = (body.text or {}).get("format"), (body.reasoning or {}).get("effort")
    if not isinstance(asked, dict | None):
        raise _wrong("text.format", asked, "must be an object")
    if not isinstance(effort, str | None):
        raise _wrong("reasoning.effort", effort, "must be text")
    return ChatBody.model_validate(
        {
            "model": body.model,
            "messages": _messages(body),
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
            "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _format(asked),
            "reasoning_effort": effort,
        }
    )


def _messages(body: ResponsesBody) -> list[Any]:
    messages: list[Any] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise _wrong("input", body.input, "give text, or a list of items")
    if len(body.input) > _MAX_ITEMS:
        raise _wrong("input", body.input, f"give at most {_MAX_ITEMS} items")
    for index, item in enumerate(body.input):
        message = _message(index, item)
        if message is not None:
            _append(messages, message)
    return messages


def _append(messages: list[Any], message: dict[str, Any]) -> None:
    """Calls are items of their own there, and belong to the message before them here."""
    last = messages[-1] if messages else None
    if "tool_calls" in message and isinstance(last, dict) and last.get("role") == "assistant":
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    else:
        messages.append(message)


def _message(index: int, item: Any) -> dict[str, Any] | None:
    match item:
        case {"type": "function_call", "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case {"type": "function_call_output", "output": output}:
            if not isinstance(output, str | list):
                output = json_text(f"input[{index}].output", output, MAX_ARGUMENTS_CHARS)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        case {"type": "reasoning"}:
            return None  # templates leave out what was thought before
        case {"role": role} if item.get("type", "message") == "message":
            return {"role": role, "content": item.get("content")}
    kind = item.get("type") if isinstance(item, dict) else item
    fault = "must be a message, a function_call or a function_call_output"
    raise _wrong(f"input[{index}].type", kind, fault)


def _wrong(field: str, value: Any, fault: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(field, f"{shown_value(value)}: {fault}"))


def _tool(tool: Any) -> Any:
    """Flat there."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
        return {"type": "function", "function": function}
    return tool


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _format(asked: Any) -> dict[str, Any] | None:
    match asked:
        case {"type": "json_schema"}:
            return {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}}
        case dict():
            return asked
    return None
