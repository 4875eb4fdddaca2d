"""/v1/responses: converts each request to a chat, and its output to items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import FailFast, Field, WithJsonSchema

from baton.errors import FieldViolation, InvalidRequest
from gateway.chat.choice import ChatChoice
from gateway.chat.style import ChatStyle
from gateway.http.conversation import MAX_ARGUMENTS_CHARS
from gateway.http.errors import Fills, invalid, shown_value
from gateway.http.format import FINISHES, OPENAI, Answer, Chunk, Route, timing_of
from gateway.http.logprobs import BytesOf
from gateway.http.requests import (
    ChoiceSoFar,
    NumTokens,
    SamplingBody,
    StructuredOutputs,
    ThinkingBudget,
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
from gateway.intake.token_bytes import text_of
from gateway.intake.validator import MAX_MESSAGES


class ResponseSoFar(ChoiceSoFar):
    """What a client has of an answer."""

    sequence_number: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Event number in the last `baton.progress`; numbering continues after it."""


class ResponsesBody(SamplingBody):
    """Fields of a responses request."""

    input: Annotated[Any, WithJsonSchema({"type": ["string", "array"]}), Fills("messages")] = None
    """Text, or the items of a conversation. Required."""
    instructions: str | None = None
    """System message before the input."""
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Annotated[NumTokens, Fills("max_completion_tokens")] = None
    include: list[str] | None = None
    """message.output_text.logprobs: return the log probability of each token of the text."""
    top_logprobs: int | None = None
    """Alternatives per token."""
    tools: Annotated[
        list[Any] | None, *(Fills(f"tools[].{path}", "[].parameters") for path in OF_PARAMETERS)
    ] = None
    """Functions that the model may call. Tools of other types, which OpenAI's own servers run, are
    left out, and named in the warning header."""
    tool_choice: Annotated[Any, OF_NAME] = None
    """Whether the model must call, and which function: none, auto, required, or a name."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    return_token_ids: bool | None = None
    """Emit `baton.progress` after the events of each piece; it allows resuming the stream."""
    resume_from: Annotated[list[ResponseSoFar] | None, FailFast()] = None
    """Output of an interrupted stream of the same request; this one continues after it. Needs
    seed."""
    text: Annotated[dict[str, Any] | None, *OF_FORMAT] = None
    """format: JSON Schema of the output."""
    structured_outputs: StructuredOutputs = None
    """Form of the output, instead of text.format; with enable_in_reasoning, of reasoning and tool
    calls, too."""
    thinking_token_budget: ThinkingBudget = None
    """Maximum tokens of reasoning, which its end mark then ends; -1: any number."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    reasoning: dict[str, Any] | None = None
    """effort: variable of the chat template."""
    enable_response_messages: bool | None = None
    """Return `input_messages` and `output_messages`: the prompt and the output as the model's own
    text and tokens."""
    metadata: Any = None
    """Returned with the answer."""
    store: bool | None = None
    """false: do not keep the answer where --response-store-bytes keeps answers."""
    previous_response_id: str | None = None
    """Kept answer whose conversation this one continues; needs --response-store-bytes."""
    background: bool | None = None
    """Answer at once, and again under the answer's own path; needs --response-store-bytes."""

    refused = (
        *("conversation", "prompt"),
        *SamplingBody.refused,
        *("n", "best_of", "prompt_logprobs", "use_beam_search"),
    )
    ignored = (
        *("truncation", "user", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "stream_options", "request_id", "spaces_between_special_tokens"),
    )

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Unknown fields, and tools that the model does not get."""
        tools = enumerate(self.tools or ())
        left_out = (f"tools[{index}]" for index, tool in tools if _is_left_out(tool))
        return (*super().unknown_fields, *left_out)


#: Faults of refused fields other than the usual one.
_REFUSALS: Mapping[str, str] = dict.fromkeys(
    ("conversation", "prompt"),
    "is not served here; send the whole conversation as input",
)
_NOTHING_KEPT = (
    "is not served here: nothing is kept without --response-store-bytes; send the whole "
    "conversation as input, and wait for the answer"
)

#: Sampling options that an answer reports.
_RESOLVED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")

#: Members that a tool of an answer has, even if it was sent without.
_TOOL = {"description": None, "parameters": None, "strict": None}

#: `include` of log probabilities.
_LOGPROBS = "message.output_text.logprobs"

#: Maximum items: messages, and per message its calls and their results.
_MAX_ITEMS = 4 * MAX_MESSAGES


@dataclass(frozen=True, slots=True)
class Kept:
    """How a gateway that keeps answers keeps one.

    earlier: items of the conversation that it continues. keep: called with the whole answer and the
    items of its conversation; None keeps nothing. on_begin: called with the answer, queued, once
    the request is admitted.
    """

    earlier: Sequence[Any]
    keep: Callable[[Mapping[str, Any], Sequence[Any]], None] | None = None
    on_begin: Callable[[Mapping[str, Any]], None] | None = None


class ResponsesFormat(TranslatedChat):
    """Response requests and answers (format.Format)."""

    id_prefix = "resp_"
    dialect = OPENAI

    def __init__(
        self, body: ResponsesBody, bytes_of: BytesOf, style: ChatStyle, kept: Kept | None = None
    ) -> None:
        """kept: None in a gateway that keeps no answers. Raises InvalidRequest with this API's
        field names."""
        self._asked = body
        violations = refusals(body, _REFUSALS)
        if kept is None:
            asked = {name for name in ("previous_response_id", "background") if getattr(body, name)}
            violations += [FieldViolation(name, _NOTHING_KEPT) for name in sorted(asked)]
        if violations:
            raise InvalidRequest.of(*violations)
        self._kept = kept or Kept(())
        messages, paths = _conversation(body, self._kept.earlier)
        super().__init__(body, _chat_fields(body, messages), paths, bytes_of, style)
        self._items = _Items(self.ids)
        self._token_ids = [i for entry in body.resume_from or () for i in entry.token_ids]
        """Of the output so far, if the client wants them."""

    @property
    def output(self) -> ChatOutput:
        return self._items

    def begin(self, prompt: int, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        super().begin(prompt, answer, prompt_token_ids)
        if self._kept.on_begin is not None:
            self._kept.on_begin(self._document("queued", None))

    def begin_stream(self) -> None:
        for kind in ("response.created", "response.in_progress"):
            self._items.emit(kind, response=self._document("in_progress", None))

    def end(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        document = {**self.whole(self.usage(usage)), **metrics}
        if self.body.return_timing and self.last is not None:
            document["timing"] = timing_of(self.last)
        self._items.emit(f"response.{self._status}", response=document)
        return self._items.take_events()

    def whole(self, usage: Mapping[str, Any]) -> Any:
        document = self._document(self._status, usage)
        if self._asked.enable_response_messages:
            document["input_messages"] = self._raw(self.prompt_token_ids)
            document["output_messages"] = self._raw(self._token_ids)
        if self._kept.keep is not None:
            made = map(_without_logprobs, self._items.items)
            self._kept.keep(document, (*self._kept.earlier, *_own_items(self._asked), *made))
        return document

    def _count(self, choice: ChatChoice, *chunks: Chunk) -> None:
        super()._count(choice, *chunks)
        if self._asked.enable_response_messages:
            for chunk in chunks:
                self._token_ids += chunk.token_ids

    def _raw(self, token_ids: Sequence[int]) -> list[Any]:
        """vLLM's message of tokens, with the text that they have in the model."""
        text = text_of(b"".join(map(self._bytes_of, token_ids)))
        return [{"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}]

    @property
    def _status(self) -> str:
        is_cut = self.last is not None and FINISHES[self.last.finish_reason] == "length"
        return "incomplete" if is_cut else "completed"

    def _document(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        asked, answer, extra = self._asked, self.answer, self._asked.model_extra or {}
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        created = answer.created if answer else 0
        ended_ms = self.last.timing.total_ms if self.last is not None else 0.0
        return {
            "id": answer.id if answer else "",
            "object": "response",
            "created_at": created,
            "completed_at": created + int(ended_ms / 1e3) if status == "completed" else None,
            "status": status,
            "model": answer.model if answer else "",
            "output": list(self._items.items),
            "error": None,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "safety_identifier": extra.get("safety_identifier"),
            "background": bool(asked.background),
            "service_tier": "default",
            "store": self._kept.keep is not None,
            "truncation": "disabled",
            "reasoning": asked.reasoning and {"effort": None, "summary": None, **asked.reasoning},
            **{name: self._resolved(name) for name in _RESOLVED},
            "text": {"format": {"type": "text"}, **(asked.text or {})},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [{**_TOOL, **tool} for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "usage": usage and _usage(usage),
        }

    def _resolved(self, option: str) -> float | None:
        """The value of a sampling option, the default if it was not asked for."""
        asked: float | None = getattr(self._asked, option)
        if asked is not None or self.answer is None:
            return asked
        resolved: float = getattr(self.answer.sampling, option)
        return round(resolved, 6)  # float32


class _Items(ChatOutput):
    """Output items and their events."""

    def __init__(self, ids: Callable[[str], Callable[[], str]]) -> None:
        """ids: generates ids of items of a kind."""
        super().__init__()
        self._new_id = {prefix: ids(prefix) for prefix in ("fc", "msg", "rs")}
        self.items: list[dict[str, Any]] = []
        """Complete items."""
        self._open: dict[str, Any] | None = None
        self._text = ""
        """Text of the open item."""
        self._logged: list[Mapping[str, Any]] = []
        """Log probabilities of its text."""
        self._unused: list[Mapping[str, Any]] = []
        """Those of tokens without text yet."""
        self._num_earlier = 0
        """How many of them precede the last piece."""
        self._num_events = 0

    def emit(self, kind: str, **fields: Any) -> None:
        super().emit(kind, sequence_number=self._num_events, **fields)
        self._num_events += 1

    def resume(self, so_far: ChoiceSoFar) -> None:
        super().resume(so_far)
        if isinstance(so_far, ResponseSoFar):
            self._num_events = so_far.sequence_number + 1

    def add_logprobs(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self._num_earlier = len(self._unused)
        self._unused += entries

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add a chat delta."""
        if "reasoning_content" in delta:
            del self._unused[: self._num_earlier]  # of the mark before it
            self._add_text("reasoning", "response.reasoning_text", delta["reasoning_content"])
        if "content" in delta:
            new, self._unused = self._unused, []
            self._add_text("message", "response.output_text", delta["content"], logprobs=new)
            self._logged += new
        for call in delta.get("tool_calls", ()):
            self._unused = []
            if "id" in call:
                name = call["function"]["name"]
                self._begin("function_call", "fc", call_id=call["id"], name=name, arguments="")
            arguments = call["function"]["arguments"]
            if arguments:
                self._text += arguments
                self.emit("response.function_call_arguments.delta", **self._where, delta=arguments)

    def close(self) -> None:
        """Close the open item."""
        item, text = self._open, self._text
        if item is None:
            return
        match item["type"]:
            case "function_call":
                done = {"name": item["name"], "arguments": text}
                self.emit("response.function_call_arguments.done", **self._where, **done)
                item["arguments"] = text
            case "message":
                logged = {"logprobs": self._logged}
                self.emit("response.output_text.done", **self._where, **_FIRST, text=text, **logged)
                part = {"type": "output_text", "text": text, "annotations": [], **logged}
                self.emit("response.content_part.done", **self._where, **_FIRST, part=part)
                item["content"] = [part]
            case _:
                self.emit("response.reasoning_text.done", **self._where, **_FIRST, text=text)
                item["content"] = [{"type": "reasoning_text", "text": text}]
        item["status"] = "completed"
        self.emit("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open, self._text = None, ""

    def _add_text(self, kind: str, event: str, text: str, **more: Any) -> None:
        if self._open is None or self._open["type"] != kind:
            if kind == "message":
                self._begin(kind, "msg", role="assistant", content=[])
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self.emit("response.content_part.added", **self._where, **_FIRST, part=part)
            else:
                self._begin(kind, "rs", summary=[], content=[])
        self._text += text
        self.emit(f"{event}.delta", **self._where, **_FIRST, delta=text, **more)

    def _begin(self, kind: str, prefix: str, **fields: Any) -> None:
        self.close()
        self._logged = []
        self._open = {"type": kind, "id": self._new_id[prefix](), "status": "in_progress", **fields}
        index = len(self.items)
        self.emit("response.output_item.added", output_index=index, item=dict(self._open))

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
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


def _chat_fields(body: ResponsesBody, messages: list[Any]) -> Mapping[str, Any]:
    """Convert to the fields of a chat."""
    asked, effort = (body.text or {}).get("format"), (body.reasoning or {}).get("effort")
    if not isinstance(asked, dict | None):
        raise _wrong("text.format", asked, "must be an object")
    if not isinstance(effort, str | None):
        raise _wrong("reasoning.effort", effort, "must be text")
    has_logprobs = _LOGPROBS in (body.include or ())
    return {
        **{
            name: getattr(body, name)
            for name in SamplingBody.model_fields
            if name in body.model_fields_set
        },
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": has_logprobs,
        "top_logprobs": body.top_logprobs,
        "tools": body.tools and [_tool(each) for each in body.tools if not _is_left_out(each)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": response_format(asked),
        "structured_outputs": body.structured_outputs,
        "thinking_token_budget": body.thinking_token_budget,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": effort,
        "resume_from": body.resume_from,
    }


def _own_items(body: ResponsesBody) -> list[Any]:
    """The items of the input."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise _wrong("input", body.input, "give text, or a list of items")
    return body.input


def _without_logprobs(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An output item for the conversation, which has no use for log probabilities: they are far
    more than the text, and would be read with each request that continues it."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _conversation(body: ResponsesBody, earlier: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """The messages of a chat, and the field path of each. earlier: items before the input."""
    messages: list[Any] = []
    paths: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        paths.append("instructions")
    items = _own_items(body)
    if len(earlier) + len(items) > _MAX_ITEMS:
        raise _wrong("input", body.input, f"give at most {_MAX_ITEMS} items, with earlier ones")
    for index, item in enumerate((*earlier, *items), -len(earlier)):
        message = _message(index, item)
        if message is not None and _append(messages, message):
            path = f"input[{index}]" if isinstance(body.input, list) else "input"
            paths.append(path if index >= 0 else "previous_response_id")
    return messages, paths


def _append(messages: list[Any], message: dict[str, Any]) -> bool:
    """Append an item. Return whether it became a new message: reasoning and calls are items here,
    and join the message that follows or precedes them."""
    last = messages[-1] if messages else {}
    if last.get("role") == message["role"] == "assistant":
        if "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            return False
        if last.keys() == {"role", "reasoning_content"} and "content" in message:
            last["content"] = message["content"]
            return False
    messages.append(message)
    return True


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
            text = _reasoning_text(index, item)
            return {"role": "assistant", "reasoning_content": text} if text else None
        case {"role": role} if item.get("type", "message") == "message":
            return {"role": role, "content": item.get("content")}
    kind = item.get("type") if isinstance(item, dict) else item
    fault = "must be a message, a function_call or a function_call_output"
    raise _wrong(f"input[{index}].type", kind, fault)


def _reasoning_text(index: int, item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, or its summary."""
    field = "content" if item.get("content") else "summary"
    parts = item.get(field) or []
    if not isinstance(parts, list):
        raise _wrong(f"input[{index}].{field}", parts, "must be a list of parts with a text")
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def _wrong(field: str, value: Any, fault: str) -> InvalidRequest:
    return invalid(field, f"{shown_value(value)}: {fault}")


def _is_left_out(tool: Any) -> bool:
    """Whether a tool has a type of its own: web search, a group of tools. Faults of others are
    reported when they are parsed."""
    return isinstance(tool, dict) and tool.get("type") not in (None, "function")


def _tool(tool: Any) -> Any:
    """Convert a tool, which is flat in this API."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
        return {"type": "function", "function": function}
    return tool


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
    return choice


ROUTE = Route(
    "/v1/responses",
    "post",
    "OpenAI's newer form of a chat; answers are kept where --response-store-bytes says so.",
    ResponsesBody,
    make=ResponsesFormat,
)
