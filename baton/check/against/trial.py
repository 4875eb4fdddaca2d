"""What the checks of one server share: requests, their answers when each is asked alone, and ways
to ask many at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from baton.check.against.answer import Answer, Choice
from baton.check.against.prompts import Prompts, greedy, seeded
from baton.check.against.server import COMPLETIONS, Body, Refused, Server

T = TypeVar("T")
R = TypeVar("R")

#: Tokens of an answer at most, and of a prompt where the server does not name its limit.
MAX_TOKENS, UNKNOWN_LEN = 32, 2048
#: A difference of log probabilities below which two tokens count as a near tie.
NEAR_TIE = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """what: was wrong. how: circumstances beside the request. body, path: the request."""

    what: str
    how: str
    path: str
    body: Body


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. num_tried: answers compared. note: what else was seen. untried: why the
    server could not be tried; else empty."""

    num_tried: int
    failures: tuple[Failure, ...] = ()
    note: str = ""
    untried: str = ""

    @property
    def has_held(self) -> bool:
        return not self.failures and not self.untried


class Trial:
    """One run against one server."""

    def __init__(self, server: Server, *, num_requests: int, concurrency: int, seed: int) -> None:
        self.server, self.num_requests, self.concurrency = server, num_requests, concurrency
        self.rng = random.Random(seed)
        length = server.max_model_len or UNKNOWN_LEN
        self.max_tokens = min(MAX_TOKENS, length // 4)
        self.prompts = Prompts(seed, length, self.max_tokens)

    @cached_property
    def more(self) -> Mapping[str, Any]:
        """Asks for log probabilities, if the server has them."""
        try:
            self.ask(greedy("def", 1, logprobs=2))
        except Refused:
            return {}
        return {"logprobs": 2}

    @cached_property
    def greedy(self) -> tuple[tuple[Body, Answer], ...]:
        """Requests, each with the answer that it has when it is asked alone."""
        bodies = [
            greedy(prompt, self.max_tokens, **self.more)
            for prompt in self.prompts.mixed(self.num_requests)
        ]
        return tuple((body, self.ask(body)) for body in bodies)

    @cached_property
    def seeded(self) -> tuple[tuple[Body, Answer], ...]:
        bodies = [
            seeded(prompt, self.max_tokens, self.rng.getrandbits(31), **self.more)
            for prompt in self.prompts.mixed(self.num_requests)
        ]
        return tuple((body, self.ask(body)) for body in bodies)

    def ask(self, body: Body) -> Answer:
        return self.server.ask(COMPLETIONS, body)

    def at_once(self, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do all, `concurrency` at a time. Raises the first Refused."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(act, items))


def difference(expected: Answer, actual: Answer) -> str:
    """What differs in the choices of two answers; empty if nothing does."""
    if len(expected.choices) != len(actual.choices):
        return f"{len(actual.choices)} choices instead of {len(expected.choices)}"
    for index, (one, other) in enumerate(zip(expected.choices, actual.choices, strict=True)):
        if found := _choice_difference(one, other):
            return found if len(expected.choices) == 1 else f"choice {index}: {found}"
    return ""


def _choice_difference(expected: Choice, actual: Choice) -> str:
    pairs = zip(expected.positions, actual.positions, strict=False)
    for index, (one, other) in enumerate(pairs):
        if one.token != other.token:
            gap = abs(one.logprob - one.top.get(other.token, float("inf")))
            tie = ", a near tie" if gap < NEAR_TIE else ""
            return f"token {index} is {other.token!r} instead of {one.token!r}{tie}"
    if expected.text != actual.text:
        return f"{actual.text!r} instead of {expected.text!r}"
    if len(expected.positions) != len(actual.positions):
        return f"{len(actual.positions)} tokens instead of {len(expected.positions)}"
    if expected.finish != actual.finish:
        return f"finish_reason {actual.finish} instead of {expected.finish}"
    return ""


def largest_gap(expected: Answer, actual: Answer) -> float:
    """Largest difference of log probabilities of tokens that are equal."""
    pairs = (
        pair
        for one, other in zip(expected.choices, actual.choices, strict=False)
        for pair in zip(one.positions, other.positions, strict=False)
    )
    return max((abs(a.logprob - b.logprob) for a, b in pairs if a.token == b.token), default=0.0)


def note_gap(gaps: Sequence[float]) -> str:
    """For a table: what log probabilities differ by."""
    largest = max(gaps, default=0.0)
    return f"log probabilities differ by up to {largest:.2g}" if largest else ""
