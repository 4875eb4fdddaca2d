"""What the validator knows of the model and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against.

    max_kv_tokens: tokens that the largest decode worker's memory holds. max_num_seqs: sequences
    that the widest one runs at once. max_token_chars: of the longest token of the tokenizer.
    has_tools: whether the chat template describes tools. aliases: further names.
    sampling_defaults: the model's own, by option.
    """

    name: str
    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    max_num_seqs: int
    max_token_chars: int
    has_tools: bool = False
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_prompt_tokens(self) -> int:
        """One token of output must fit, too."""
        return min(self.max_model_len, self.max_kv_tokens) - 1

    @property
    def max_prompt_chars(self) -> int:
        """A longer text is not looked at. It would have too many tokens, unless the tokenizer
        leaves most of it out."""
        return self.max_prompt_tokens * self.max_token_chars
