"""What the tests of the HTTP API ask for, and what must come: without a client's package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from baton.types import Sampling
from engine.oracle import oracle_tokens
from tests.support.oracle_model import VOCAB_SIZE

MODEL = "oracle"
KEY = "sk-of-the-test"
PROMPT = "the rain in spain"
MESSAGES = [{"role": "user", "content": "say a thing"}]

#: Options of requests with known tokens.
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@dataclass(frozen=True)
class World:
    """What the expected is made of."""

    tokenizer: tokenizers.Tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids)))

    def tokens(self, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> list[int]:
        sampling.setdefault("temperature", 0.0)
        return oracle_tokens(prompt, Sampling(max_tokens=max_tokens, **sampling), VOCAB_SIZE)

    def completion(self, prompt: str, max_tokens: int = 8, **sampling: Any) -> str:
        return self.text(self.tokens(self.ids(prompt), max_tokens, **sampling))

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return self.ids(f"{text}<|im_start|>assistant\n")

    def reply(self, messages: Sequence[Mapping[str, str]], max_tokens: int = 8) -> str:
        return self.text(self.tokens(self.chat_ids(messages), max_tokens))
