"""Builds the messages to send. Pure; raises InvalidRequest for what a message cannot carry, naming
the field.

Ranges are the server's to check: there is one validator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any, TypeAlias

from baton.client.chat import ChatMessage, ChatPrompt, Tool, ToolCall
from baton.errors import FieldViolation, InvalidRequest
from baton.sampling_params import (
    OPTIONS,
    BeamSearch,
    SamplingOptions,
    SamplingParams,
    StructuredOutput,
    Texts,
    TokenBiases,
    TokenIds,
)
from baton.v1 import inference_pb2, sampling_pb2

PromptLike: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, Any]] | ChatPrompt
"""Text; token ids; or a conversation of messages, each a ChatMessage or a mapping with "role",
"content" and other fields of ChatMessage."""


class StreamOptions(SamplingOptions, total=False):
    """Options of `stream` except prompt and SamplingParams, for type checkers."""

    model: str
    priority: int
    cache_salt: str
    slo_class: str
    add_special_tokens: bool
    return_receipt: bool
    request_id: str
    timeout_s: float | None


def options_of(options: StreamOptions, index: int) -> StreamOptions:
    """Options for one of several prompts, each a request of its own."""
    request_id = options.get("request_id", "")
    return {**options, "request_id": f"{request_id}-{index}"} if request_id else options


_STRUCTURED = "sampling.structured_output"

_EARLY_STOPPING: Mapping[bool | str, sampling_pb2.EarlyStopping.ValueType] = {
    False: sampling_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: sampling_pb2.EARLY_STOPPING_ALWAYS,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}


def generate_request(
    prompt: PromptLike,
    params: SamplingParams,
    *,
    model: str,
    priority: int,
    cache_salt: str,
    slo_class: str = "",
    add_special_tokens: bool,
    return_receipt: bool = False,
) -> inference_pb2.GenerateRequest:
    """Build the message of Generate."""
    request = inference_pb2.GenerateRequest(
        model=_checked_text("model", model),
        prompt=prompt_message(prompt, add_special_tokens=add_special_tokens),
        sampling=sampling_message(params),
        cache_salt=_checked_text("cache_salt", cache_salt),
        slo_class=_checked_text("slo_class", slo_class),
        return_receipt=return_receipt,
    )
    with _naming("priority", priority):
        request.priority = priority
    return request


def tokenize_request(
    prompt: PromptLike, *, model: str, add_special_tokens: bool
) -> inference_pb2.TokenizeRequest:
    """Build the message of Tokenize."""
    return inference_pb2.TokenizeRequest(
        model=_checked_text("model", model),
        prompt=prompt_message(prompt, add_special_tokens=add_special_tokens),
    )


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """Build the message of Detokenize."""
    return inference_pb2.DetokenizeRequest(
        model=_checked_text("model", model),
        token_ids=_token_ids("token_ids", token_ids),
        skip_special_tokens=skip_special_tokens,
    )


def get_model_request(*, model: str) -> inference_pb2.GetModelRequest:
    """Build the message of GetModel."""
    return inference_pb2.GetModelRequest(model=_checked_text("model", model))


def prompt_message(prompt: PromptLike, *, add_special_tokens: bool = True) -> inference_pb2.Prompt:
    """Build a prompt. Its kind follows from its type; an empty sequence means token ids.
    add_special_tokens: applies to text only."""
    if isinstance(prompt, str):
        text = _checked_text("prompt.text", prompt)
        return inference_pb2.Prompt(text=text, omit_special_tokens=not add_special_tokens)
    if isinstance(prompt, ChatPrompt):
        return inference_pb2.Prompt(chat=_chat(prompt))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise _wrong("prompt", prompt, "must be text, a list of token ids, or chat messages")
    if len(prompt) > 0 and isinstance(prompt[0], ChatMessage | Mapping):
        return inference_pb2.Prompt(chat=_chat(ChatPrompt(prompt)))  # type: ignore[arg-type]
    ids = _token_ids("prompt.token_ids.ids", prompt)
    return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=ids))


def sampling_message(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Build sampling parameters; fields that are None stay unset."""
    message = sampling_pb2.SamplingParams()
    for name, option in OPTIONS.items():
        value = getattr(params, name)
        if value is None:
            continue
        field = f"sampling.{name}"
        match option.limits:
            case Texts():
                getattr(message, name).extend(_texts(field, value))
            case TokenIds():
                getattr(message, name).extend(_token_ids(field, value))
            case TokenBiases():
                biases = getattr(message, name)
                for token_id, bias in value.items():
                    with _naming(f"{field}[{token_id!r}]", bias):
                        biases[token_id] = bias
            case _ if name == "beam_search":
                message.beam_search.CopyFrom(_beam_message(value))
            case _ if name == "structured_output":
                message.structured_output.CopyFrom(_structured_message(value))
            case _:
                with _naming(field, value):
                    setattr(message, name, value)
    return message


@contextmanager
def _naming(field: str, value: object) -> Iterator[None]:
    """Converts protobuf's errors to InvalidRequest with the field's name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise _wrong(field, value, str(error)) from error


def _beam_message(beam: BeamSearch) -> sampling_pb2.BeamSearch:
    message = sampling_pb2.BeamSearch()
    for name in ("width", "length_penalty"):
        value = getattr(beam, name)
        with _naming(f"sampling.beam_search.{name}", value):
            setattr(message, name, value)
    if beam.early_stopping not in _EARLY_STOPPING:
        raise _wrong(
            "sampling.beam_search.early_stopping",
            beam.early_stopping,
            'must be False, True or "never"',
        )
    message.early_stopping = _EARLY_STOPPING[beam.early_stopping]
    return message


def _structured_message(output: StructuredOutput) -> sampling_pb2.StructuredOutput:
    """Build a structured output. Raises InvalidRequest for more than one constraint, and for values
    that the message cannot hold."""
    kinds = ("json_schema", "json_object", "regex", "choice", "grammar")
    given = [kind for kind in kinds if getattr(output, kind) is not None]
    if len(given) > 1:
        raise _refused(_STRUCTURED, f"{' and '.join(given)} are given; give one")
    message = sampling_pb2.StructuredOutput()
    if output.json_schema is not None:
        message.json_schema = _json(f"{_STRUCTURED}.json_schema", output.json_schema)
    if output.json_object is not None:
        if not isinstance(output.json_object, bool):
            raise _wrong(f"{_STRUCTURED}.json_object", output.json_object, "must be True")
        message.json_object = output.json_object
    if output.regex is not None:
        message.regex = _checked_text(f"{_STRUCTURED}.regex", output.regex)
    if output.choice is not None:
        if isinstance(output.choice, str):
            raise _refused(f"{_STRUCTURED}.choice", "is one text; give a list of them")
        message.choice.values.extend(
            _checked_text(f"{_STRUCTURED}.choice.values[{i}]", text)
            for i, text in enumerate(output.choice)
        )
        message.choice.SetInParent()
    if output.grammar is not None:
        message.grammar = _checked_text(f"{_STRUCTURED}.grammar", output.grammar)
    return message


def _json(field: str, value: Mapping[str, Any] | str) -> str:
    """JSON text of an object; a string is returned unchanged."""
    if isinstance(value, str):
        return _checked_text(field, value)
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(field, f"cannot be written as JSON: {error}") from error


def _texts(field: str, texts: str | Sequence[str]) -> list[str]:
    """A list of texts; a single text becomes a list of one."""
    together = (texts,) if isinstance(texts, str) else texts
    return [_checked_text(f"{field}[{i}]", text) for i, text in enumerate(together)]


def _chat(prompt: ChatPrompt) -> inference_pb2.ChatPrompt:
    kwargs = prompt.template_kwargs
    chat = inference_pb2.ChatPrompt(
        messages=[_chat_message(i, message) for i, message in enumerate(prompt.messages)],
        tools=[_tool(f"prompt.chat.tools[{i}]", tool) for i, tool in enumerate(prompt.tools)],
        template_kwargs=_json("prompt.chat.template_kwargs", kwargs) if kwargs else "",
    )
    for name in ("continue_final_message", "add_generation_prompt"):
        value = getattr(prompt, name)
        if value is not None:
            with _naming(f"prompt.chat.{name}", value):
                setattr(chat, name, value)
    return chat


def _chat_message(
    position: int, message: int | str | ChatMessage | Mapping[str, Any]
) -> inference_pb2.ChatMessage:
    field = f"prompt.chat.messages[{position}]"
    if isinstance(message, Mapping):
        keys = sorted(message)
        try:
            message = ChatMessage(**message)
        except TypeError:
            fault = "needs the keys 'role' and 'content', and may have ChatMessage's others"
            raise _wrong(field, keys, fault) from None
    if not isinstance(message, ChatMessage):
        raise _wrong(field, message, "must be a ChatMessage or a mapping with role and content")
    calls = enumerate(message.tool_calls)
    return inference_pb2.ChatMessage(
        role=_checked_text(f"{field}.role", message.role),
        content=_checked_text(f"{field}.content", message.content),
        tool_calls=[_tool_call(f"{field}.tool_calls[{i}]", call) for i, call in calls],
        tool_call_id=_checked_text(f"{field}.tool_call_id", message.tool_call_id),
        name=_checked_text(f"{field}.name", message.name),
        reasoning_content=_checked_text(f"{field}.reasoning_content", message.reasoning_content),
    )


def _tool_call(field: str, call: ToolCall) -> inference_pb2.ToolCall:
    if not isinstance(call, ToolCall):
        raise _wrong(field, call, "must be a ToolCall")
    return inference_pb2.ToolCall(
        id=_checked_text(f"{field}.id", call.id),
        name=_checked_text(f"{field}.name", call.name),
        arguments=_json(f"{field}.arguments", call.arguments),
    )


def _tool(field: str, tool: Tool) -> inference_pb2.Tool:
    if not isinstance(tool, Tool):
        raise _wrong(field, tool, "must be a Tool")
    return inference_pb2.Tool(
        name=_checked_text(f"{field}.name", tool.name),
        description=_checked_text(f"{field}.description", tool.description),
        parameters="" if tool.parameters is None else _json(f"{field}.parameters", tool.parameters),
    )


def _token_ids(field: str, token_ids: Sequence[object]) -> list[int]:
    ids = []
    for position, token_id in enumerate(token_ids):
        try:
            ids.append(index(token_id))  # type: ignore[arg-type]
        except TypeError as error:
            raise _wrong(f"{field}[{position}]", token_id, "must be an integer") from error
        if not 0 <= ids[-1] < 2**32:
            raise _wrong(
                f"{field}[{position}]",
                token_id,
                "must be 0 or more and below the vocabulary's size",
            )
    return ids


def _checked_text(field: str, text: str) -> str:
    """Return `text`. Raises InvalidRequest naming field, position and fix if UTF-8 cannot encode
    it."""
    if not isinstance(text, str):
        raise _wrong(field, text, "must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(
            field,
            f"lone surrogate U+{ord(text[error.start]):04X} at position {error.start}; "
            "it is half a character, often from bytes decoded with errors='surrogateescape': "
            "decode them as UTF-8, or replace it, as "
            "text.encode('utf-8', 'replace').decode() does",
        ) from None
    return text


def _wrong(field: str, value: object, fix: str) -> InvalidRequest:
    """Error for a value that the message cannot hold."""
    return _refused(field, f"{value!a:.80}: {fix}")


def _refused(field: str, description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(field, description))
