"""/tokenize and /detokenize: what a request may have, and the prompt that it means."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.chat.style import ChatStyle
from gateway.http.chat import ChatBody, ChatFormat
from gateway.http.completions import OF_PROMPT, TOKEN_IDS, put_text_prompt
from gateway.http.conversation import MESSAGES
from gateway.http.errors import FieldNames, Fills, names_in
from gateway.http.logprobs import BytesOf
from gateway.http.requests import ModelBody, validated

#: Of a conversation, as /v1/chat/completions has them.
_OF_CHAT = (
    *("messages", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)


class TokenizeBody(ModelBody):
    """Of a prompt, or of a conversation."""

    prompt: Annotated[Any, WithJsonSchema({"type": ["string", "array"]}), *OF_PROMPT] = None
    """Text, or token ids, which come back as they are."""
    messages: Annotated[list[Any] | None, WithJsonSchema(MESSAGES)] = None
    """A conversation, instead of prompt, by the model's chat template."""
    add_special_tokens: bool | None = None
    """false: text is tokenized without the tokenizer's own special tokens. Those of a conversation
    are its template's alone."""
    tools: list[Any] | None = None
    """What the model may call; as the next three, of a conversation, and as in a chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    add_generation_prompt: bool | None = None
    """false: do not begin a message of the assistant."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    return_token_strs: bool | None = None
    """Give each token's text, too."""

    refused = ("chat_template",)
    id_fields = ("prompt",)


class DetokenizeBody(ModelBody):
    """Of token ids."""

    tokens: Annotated[Any, WithJsonSchema(TOKEN_IDS), Fills("token_ids")]
    """Token ids."""

    id_fields = ("tokens",)


def put_tokenized_prompt(
    body: TokenizeBody, bytes_of: BytesOf, style: ChatStyle, prompt: inference_pb2.Prompt
) -> FieldNames:
    """The prompt into an empty one; and what its parts are called in errors. Raises
    InvalidRequest."""
    if body.messages is None:
        put_text_prompt("prompt", body.prompt, prompt)
        prompt.omit_special_tokens = body.add_special_tokens is False
        return names_in(body)
    if body.add_special_tokens:
        fault = "true: the chat template writes the special tokens; leave it out, or give prompt"
        raise InvalidRequest.of(FieldViolation("add_special_tokens", fault))
    chat = ChatFormat(
        validated(ChatBody, {name: getattr(body, name) for name in _OF_CHAT}), bytes_of, style
    )
    prompt.CopyFrom(chat.requests[0].prompt)
    return chat.field_names
