"""What the validator knows of the model and its workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against.

    max_kv_tokens: tokens that the largest decode worker's memory holds. max_num_seqs: sequences
    that the widest one runs at once.
    """

    name: str
    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    max_num_seqs: int

    @property
    def max_prompt_tokens(self) -> int:
        """One token of output must fit, too."""
        return min(self.max_model_len, self.max_kv_tokens) - 1
