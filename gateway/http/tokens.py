"""/tokenize, /detokenize and /tokenizer_info: request fields and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from baton.v1 import inference_pb2
from gateway.chat.style import ChatStyle
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.completions import OF_PROMPT, TOKEN_IDS, put_text_prompt
from gateway.http.connection import HttpRequest, HttpResponse
from gateway.http.conversation import MESSAGES
from gateway.http.errors import FieldNames, Fills, in_words_of, names_in
from gateway.http.format import Door, Route, send_json
from gateway.http.logprobs import BytesOf
from gateway.http.requests import ModelBody, put_token_ids, validated
from gateway.long_work import in_pieces

#: Token ids serialized at once, with their texts if requested.
_IDS_A_PIECE = 8192

#: Fields shared with /v1/chat/completions.
_OF_CHAT = (
    *("messages", "tools", "chat_template_kwargs", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message"),
)


class TokenizeBody(ModelBody):
    """Fields of a tokenize request: a prompt or a conversation."""

    prompt: Annotated[Any, WithJsonSchema({"type": ["string", "array"]}), *OF_PROMPT] = None
    """Text, or token ids, which are returned unchanged."""
    messages: Annotated[list[Any] | None, WithJsonSchema(MESSAGES)] = None
    """A conversation, rendered by the chat template, instead of prompt."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens: true by default for a text prompt, false for a
    conversation, where the chat template writes them."""
    tools: list[Any] | None = None
    """Functions that the model may call. This field and the next three apply to a conversation, as
    in a chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    add_generation_prompt: bool | None = None
    """false: do not begin the assistant's message."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    return_token_strs: bool | None = None
    """Return each token in the vocabulary's spelling, too."""

    refused = ("chat_template",)
    id_fields = ("prompt",)


class DetokenizeBody(ModelBody):
    """Fields of a detokenize request."""

    tokens: Annotated[Any, WithJsonSchema(TOKEN_IDS), Fills("token_ids")]
    """Token ids."""

    id_fields = ("tokens",)


def _put_prompt(
    body: TokenizeBody, bytes_of: BytesOf, style: ChatStyle, prompt: inference_pb2.Prompt
) -> FieldNames:
    """Write the prompt into an empty one, and return the names of its parts in errors. Raises
    InvalidRequest."""
    if body.messages is None:
        put_text_prompt("prompt", body.prompt, prompt)
        prompt.omit_special_tokens = body.add_special_tokens is False
        return names_in(body)
    chat = ChatFormat(
        validated(ChatBody, {name: getattr(body, name) for name in _OF_CHAT}), bytes_of, style
    )
    prompt.CopyFrom(chat.requests[0].prompt)
    return chat.field_names


async def _tokenize(door: Door, request: HttpRequest, response: HttpResponse) -> None:
    body = await door.parsed(TokenizeBody, request, response)
    serving = door.models.of(body.model or "")
    bytes_of = serving.tokenizer.bytes_of
    asked = inference_pb2.TokenizeRequest(model=body.model or "")
    names = _put_prompt(body, bytes_of, door.styles[serving], asked.prompt)
    with in_words_of(names):
        token_ids = await serving.tokenize(asked)
    facts = {"count": len(token_ids), "max_model_len": serving.facts.max_model_len}
    tokens, texts = await _json_list(token_ids, lambda token_id: token_id), "null"
    if body.return_token_strs:
        texts = await _json_list(token_ids, serving.tokenizer.name_of)
    document = f'{json.dumps(facts)[:-1]}, "tokens": {tokens}, "token_strs": {texts}}}'
    await send_json(document, request, response)


async def _detokenize(door: Door, request: HttpRequest, response: HttpResponse) -> None:
    body = await door.parsed(DetokenizeBody, request, response)
    asked = inference_pb2.DetokenizeRequest(model=body.model or "")
    put_token_ids("tokens", body.tokens, asked.token_ids)
    serving = door.models.of(asked.model)
    with in_words_of(names_in(body)):
        text = await serving.detokenize(asked)
    await send_json({"prompt": text}, request, response)


async def _tokenizer_info(door: Door, request: HttpRequest, response: HttpResponse) -> None:
    """Send what renders and counts prompts elsewhere, with the names of tokenizer_config.json."""
    serving = door.models.of("")
    facts = serving.tokenizer.facts
    document = {
        **facts.special_tokens,
        "chat_template": facts.chat_template,
        "model_max_length": serving.facts.max_model_len,
        "tokenizer_class": facts.tokenizer_class,
    }
    await send_json(document, request, response)


async def _json_list(token_ids: Sequence[int], make: Callable[[int], Any]) -> str:
    """Serialize a list in pieces. make: the value to write for a token id."""
    written: list[str] = []

    def write(ids: Sequence[int]) -> None:
        written.append(json.dumps([make(token_id) for token_id in ids])[1:-1])

    await in_pieces(token_ids, write, _IDS_A_PIECE)
    return f"[{', '.join(written)}]"


ROUTES = (
    Route(
        "/tokenize",
        "post",
        "Token ids of a prompt or a conversation.",
        TokenizeBody,
        handle=_tokenize,
    ),
    Route("/detokenize", "post", "Text of token ids.", DetokenizeBody, handle=_detokenize),
    Route(
        "/tokenizer_info",
        "get",
        "Names of special tokens, and the chat template.",
        handle=_tokenizer_info,
    ),
)
