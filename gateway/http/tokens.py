"""/tokenize and /detokenize: what a request may have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from gateway.http.chat import MESSAGES
from gateway.http.completions import TOKEN_IDS
from gateway.http.requests import ModelBody


class TokenizeBody(ModelBody):
    """Of a prompt, or of a conversation."""

    prompt: Annotated[Any, WithJsonSchema({"type": ["string", "array"]})] = None
    """Text, or token ids, which come back as they are."""
    messages: Annotated[list[Any] | None, WithJsonSchema(MESSAGES)] = None
    """A conversation, instead of prompt, by the model's chat template."""
    return_token_strs: bool | None = None
    """Give each token's text, too."""

    ignored = ("add_special_tokens", "add_generation_prompt")


class DetokenizeBody(ModelBody):
    """Of token ids."""

    tokens: Annotated[list[Any], WithJsonSchema(TOKEN_IDS)]
    """Token ids."""
