"""Prompts of a check: English and code of many lengths, prefixes that several share, and canaries.
Drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT = (
    "the a of to and in that is was for it with as on be at by this had not are but from or have "
    "an they which one you were all her she there would their we him been has when who will no "
    "more if out so said what up its about into than them can only other time new some could these "
    "two may first then do any like my now over such our man even most made after also did many "
    "def return self value list index for while if else class import print range name key data"
)
_WORDS = tuple(_TEXT.split())
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
#: Few, so that even a small model may repeat them, and too many to be met by chance.
_CANARY_LETTERS = 6
#: Times that a canary stands in its prompt, for the same.
_NUM_REPEATS = 12
_TOKENS_PER_WORD = 3
_MAX_WORDS = 400
#: Words of a prefix that prompts share: several KV blocks of any usual size.
_PREFIX_WORDS = 120


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody with a secret that no answer to others may have."""

    canary: str
    prompt: str


class Prompts:
    """Draws prompts. max_model_len: of the model, in tokens."""

    def __init__(self, seed: int, max_model_len: int, max_tokens: int) -> None:
        self._rng = random.Random(seed)
        fits = (max_model_len - max_tokens) // _TOKENS_PER_WORD
        self._longest = max(8, min(_MAX_WORDS, fits))
        self._prefix_words = min(_PREFIX_WORDS, self._longest // 2)

    def words(self, num_words: int) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(num_words))

    def prefix(self) -> str:
        return self.words(self._prefix_words)

    def mixed(self, num_prompts: int) -> tuple[str, ...]:
        """Mostly short, some long; a third shares one of two prefixes."""
        prefixes = [self.prefix(), self.prefix()]
        prompts = []
        for _ in range(num_prompts):
            longest = self._longest - self._prefix_words
            text = self.words(min(longest, 4 + int(self._rng.expovariate(6 / self._longest))))
            is_shared = self._rng.random() < 1 / 3
            prompts.append(f"{self._rng.choice(prefixes)} {text}" if is_shared else text)
        return tuple(prompts)

    def nonce(self) -> str:
        """Text that no prompt had before, to begin one that no cache holds."""
        return "".join(self._rng.choice(_LETTERS) for _ in range(12))

    def tenants(self, num_tenants: int) -> tuple[Tenant, ...]:
        """Prompts that share a long prefix and then ask for a canary, which stands in them."""
        prefix, found = self.prefix(), []
        for _ in range(num_tenants):
            canary = "".join(self._rng.choice(_LETTERS) for _ in range(_CANARY_LETTERS))
            lines = f"print('{canary}')\n" * _NUM_REPEATS
            found.append(Tenant(canary, f"{prefix}\n{lines}print('"))
        return tuple(found)


def greedy(prompt: str, max_tokens: int, **more: Any) -> Mapping[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def seeded(prompt: str, max_tokens: int, seed: int, **more: Any) -> Mapping[str, Any]:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
    return {"prompt": prompt, "max_tokens": max_tokens, **sampling, **more}
