"""One client's view of one stream, and checks of the promises about streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.client import SamplingParams
from baton.client.results import Chunk, Usage


class StreamRequest(Protocol):
    """One prompt in token ids, with its sampling. model: empty for the only one."""

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def model(self) -> str: ...


class StreamHistory:
    """History of a stream with known output. Required: each token of each choice once, in order and
    correct; one end per choice, one end of the stream, and nothing after either."""

    def __init__(self, request: StreamRequest) -> None:
        self._request = request
        self._tokens: list[list[int]] = [[] for _ in range(request.params.n or 1)]
        self._ended: set[int] = set()
        self._usage: Usage | None = None
        self._wrong: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(map(len, self._tokens))

    def take(self, chunk: Chunk) -> None:
        """Add the next piece."""
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

    def difference(self, right: Sequence[Sequence[int]], *, is_whole: bool) -> str:
        """The first token that differs from `right`, the tokens of each choice; empty if none does.
        is_whole: whether the stream ended normally, not by an error or a cancel."""
        return "; ".join(
            f"choice {choice} is not what it should be"
            for choice, (tokens, all_of_it) in enumerate(zip(self._tokens, right, strict=True))
            if tokens != list(all_of_it if is_whole else all_of_it[: len(tokens)])
        )

    def disorder(self, *, is_whole: bool) -> str:
        """The first fault in its order, ends or usage; empty if there is none."""
        return "; ".join([*self._wrong, *(self._wrong_ends() if is_whole else ())])

    def verdict(self, right: Sequence[Sequence[int]], *, is_whole: bool) -> str:
        """All faults; empty if there is none."""
        found = (self.disorder(is_whole=is_whole), self.difference(right, is_whole=is_whole))
        return "; ".join(filter(None, found))

    def _wrong_ends(self) -> list[str]:
        wrong = [
            f"choice {choice} has no end"
            for choice in range(len(self._tokens))
            if choice not in self._ended
        ]
        params = self._request.params
        # Tokens of choices that are not returned are charged, too.
        is_all_returned = params.beam_search is None and params.best_of in (None, params.n or 1)
        if self._usage is None:
            wrong.append("the stream's last piece has no usage")
        elif is_all_returned and self._usage.completion_tokens != self.num_tokens:
            wrong.append(
                f"{self._usage.completion_tokens} tokens are charged for {self.num_tokens}"
            )
        elif self._usage.prompt_tokens != len(self._request.prompt):
            wrong.append(f"a prompt of {self._usage.prompt_tokens} tokens is charged")
        return wrong
