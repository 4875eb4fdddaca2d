"""Builds the messages to send. Pure; raises InvalidRequest for what a message cannot carry, naming
the field.

Ranges are the server's to check: there is one validator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import index
from typing import TypeAlias

from baton.client.params import BeamSearch, SamplingParams
from baton.client.results import ChatMessage
from baton.client.structured_output import structured_message
from baton.client.text import checked_text, wrong
from baton.v1 import inference_pb2, sampling_pb2

PromptLike: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
"""Text; token ids; or a conversation, each message a ChatMessage or a mapping with "role" and
"content"."""

_SCALARS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name
    not in {
        "logit_bias",
        "stop",
        "stop_token_ids",
        "bad_words",
        "beam_search",
        "structured_output",
    }
)


_EARLY_STOPPING: Mapping[bool | str, sampling_pb2.EarlyStopping.ValueType] = {
    False: sampling_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: sampling_pb2.EARLY_STOPPING_ALWAYS,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}


def generate_request(
    prompt: PromptLike, params: SamplingParams, *, model: str, priority: int, cache_salt: str
) -> inference_pb2.GenerateRequest:
    """The message of Generate."""
    request = inference_pb2.GenerateRequest(
        model=checked_text("model", model),
        prompt=prompt_message(prompt),
        sampling=sampling_message(params),
        cache_salt=checked_text("cache_salt", cache_salt),
    )
    try:
        request.priority = priority
    except (TypeError, ValueError) as error:
        raise wrong("priority", priority, str(error)) from error
    return request


def tokenize_request(prompt: PromptLike, *, model: str) -> inference_pb2.TokenizeRequest:
    """The message of Tokenize."""
    return inference_pb2.TokenizeRequest(
        model=checked_text("model", model), prompt=prompt_message(prompt)
    )


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """The message of Detokenize."""
    return inference_pb2.DetokenizeRequest(
        model=checked_text("model", model),
        token_ids=_token_ids("token_ids", token_ids),
        skip_special_tokens=skip_special_tokens,
    )


def get_model_request(*, model: str) -> inference_pb2.GetModelRequest:
    """The message of GetModel."""
    return inference_pb2.GetModelRequest(model=checked_text("model", model))


def prompt_message(prompt: PromptLike) -> inference_pb2.Prompt:
    """The kind of prompt is told by its type; an empty sequence is one of token ids."""
    if isinstance(prompt, str):
        return inference_pb2.Prompt(text=checked_text("prompt.text", prompt))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise wrong("prompt", prompt, "must be text, a list of token ids, or chat messages")
    if len(prompt) > 0 and isinstance(prompt[0], ChatMessage | Mapping):
        messages = [_chat_message(i, message) for i, message in enumerate(prompt)]
        return inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=messages))
    ids = _token_ids("prompt.token_ids.ids", prompt)
    return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=ids))


def sampling_message(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Fields that are None stay unset."""
    message = sampling_pb2.SamplingParams()
    for name in _SCALARS:
        value = getattr(params, name)
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise wrong(f"sampling.{name}", value, str(error)) from error
    message.stop.extend(_texts("sampling.stop", params.stop or ()))
    message.bad_words.extend(_texts("sampling.bad_words", params.bad_words or ()))
    if params.beam_search is not None:
        message.beam_search.CopyFrom(_beam_message(params.beam_search))
    if params.structured_output is not None:
        message.structured_output.CopyFrom(structured_message(params.structured_output))
    message.stop_token_ids.extend(
        _token_ids("sampling.stop_token_ids", params.stop_token_ids or ())
    )
    for token_id, bias in (params.logit_bias or {}).items():
        try:
            message.logit_bias[token_id] = bias
        except (TypeError, ValueError) as error:
            raise wrong(f"sampling.logit_bias[{token_id!r}]", bias, str(error)) from error
    return message


def _beam_message(beam: BeamSearch) -> sampling_pb2.BeamSearch:
    message = sampling_pb2.BeamSearch()
    for name in ("width", "length_penalty"):
        value = getattr(beam, name)
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise wrong(f"sampling.beam_search.{name}", value, str(error)) from error
    if beam.early_stopping not in _EARLY_STOPPING:
        raise wrong(
            "sampling.beam_search.early_stopping",
            beam.early_stopping,
            'must be False, True or "never"',
        )
    message.early_stopping = _EARLY_STOPPING[beam.early_stopping]
    return message


def _texts(field: str, texts: str | Sequence[str]) -> list[str]:
    """A text alone is a sequence of one."""
    together = (texts,) if isinstance(texts, str) else texts
    return [checked_text(f"{field}[{i}]", text) for i, text in enumerate(together)]


def _chat_message(
    position: int, message: int | str | ChatMessage | Mapping[str, str]
) -> inference_pb2.ChatMessage:
    field = f"prompt.chat.messages[{position}]"
    if isinstance(message, Mapping):
        if set(message) != {"role", "content"}:
            raise wrong(field, sorted(message), "needs exactly the keys 'role' and 'content'")
        message = ChatMessage(message["role"], message["content"])
    if not isinstance(message, ChatMessage):
        raise wrong(field, message, "must be a ChatMessage or a mapping with role and content")
    return inference_pb2.ChatMessage(
        role=checked_text(f"{field}.role", message.role),
        content=checked_text(f"{field}.content", message.content),
    )


def _token_ids(field: str, token_ids: Sequence[object]) -> list[int]:
    ids = []
    for position, token_id in enumerate(token_ids):
        try:
            ids.append(index(token_id))  # type: ignore[arg-type]
        except TypeError as error:
            raise wrong(f"{field}[{position}]", token_id, "must be an integer") from error
        if not 0 <= ids[-1] < 2**32:
            raise wrong(
                f"{field}[{position}]",
                token_id,
                "must be 0 or more and below the vocabulary's size",
            )
    return ids
