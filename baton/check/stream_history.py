"""What one client saw of one stream, and whether it may be so: the promises about streams, checked
from outside."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.client import SamplingParams
from baton.client.results import Chunk, Usage
from baton.engine.oracle import oracle_tokens
from baton.types import Sampling

#: Vocabulary of the oracle engine.
VOCAB_SIZE = 1000


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What is asked for: so many tokens of each choice, whatever they are."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    num_tokens: int
    num_choices: int = 1

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            n=self.num_choices,
        )

    def right_output(self, choice: int, num_tokens: int) -> list[int]:
        """The first tokens of it, at least one."""
        sampling = Sampling(temperature=self.temperature, seed=self.seed, max_tokens=num_tokens)
        return oracle_tokens(self.prompt, sampling, VOCAB_SIZE, choice)


def draw_request(rng: random.Random, max_prompt_tokens: int, num_tokens: int) -> StreamRequest:
    """Greedy or sampled, of one choice or, less often, two."""
    num_prompt_tokens = rng.randint(20, max_prompt_tokens)
    return StreamRequest(
        prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)),
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(63),
        num_tokens=num_tokens,
        num_choices=rng.choice([1, 1, 2]),
    )


class StreamHistory:
    """Of a request to oracle engines, whose right output is known: each token of each choice once,
    in order and with the right value; one end of each choice, one of the stream, and nothing after
    either."""

    def __init__(self, request: StreamRequest) -> None:
        self._request = request
        self._tokens: list[list[int]] = [[] for _ in range(request.num_choices)]
        self._ended: set[int] = set()
        self._usage: Usage | None = None
        self._wrong: list[str] = []

    def take(self, chunk: Chunk) -> None:
        """The next piece that came."""
        tokens = self._tokens[chunk.choice]
        if self._usage is not None:
            self._wrong.append("something came after the stream's end")
        if chunk.choice in self._ended:
            self._wrong.append(f"something came after the end of choice {chunk.choice}")
        if chunk.token_index != len(tokens):
            self._wrong.append(f"token {chunk.token_index} came after {len(tokens)} tokens")
        tokens.extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._ended.add(chunk.choice)
        if chunk.usage is not None:
            self._usage = chunk.usage

    def verdict(self, *, is_whole: bool) -> str:
        """What is wrong with it; empty if nothing is. is_whole: whether it ended well, not by an
        error or a cancel."""
        wrong = list(self._wrong)
        for choice, tokens in enumerate(self._tokens):
            num_tokens = self._request.num_tokens if is_whole else len(tokens)
            if num_tokens and tokens != self._request.right_output(choice, num_tokens):
                wrong.append(f"choice {choice} is not the oracle's")
        if is_whole:
            wrong += self._wrong_ends()
        return "; ".join(wrong)

    def _wrong_ends(self) -> list[str]:
        wrong = [
            f"choice {choice} has no end"
            for choice in range(len(self._tokens))
            if choice not in self._ended
        ]
        num_tokens = sum(map(len, self._tokens))
        if self._usage is None:
            wrong.append("the stream's last piece has no usage")
        elif self._usage.completion_tokens != num_tokens:
            wrong.append(f"{self._usage.completion_tokens} tokens are charged for {num_tokens}")
        elif self._usage.prompt_tokens != len(self._request.prompt):
            wrong.append(f"a prompt of {self._usage.prompt_tokens} tokens is charged")
        return wrong
