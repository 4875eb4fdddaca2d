"""A worker's matchers: each grammar is compiled once, in a separate thread, while the first prompt
with it is prefilled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from llguidance import LLMatcher

from baton.errors import EngineFault, InvalidRequest
from baton.types import Sampling
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher, compile_grammar, refusal
from engine.grammar.vocabulary import GrammarVocabulary

#: Compiled grammars kept for later sequences.
NUM_KEPT = 64

#: Seconds that a step without other work waits for a grammar.
MAX_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar, from which matchers are copied."""

    inner: LLMatcher
    vocabulary: GrammarVocabulary


@dataclass(frozen=True, slots=True)
class MatcherFuture:
    """The matchers of one sequence and its choices, available once the grammar is compiled."""

    compiled: Future[CompiledGrammar]
    end_token_ids: frozenset[int]

    @property
    def is_ready(self) -> bool:
        """Whether `matcher` returns without waiting."""
        return self.compiled.done()

    def matcher(self) -> Matcher:
        """A new matcher, before the first output token. Raises InvalidRequest for an invalid
        grammar, EngineFault if this worker cannot compile grammars."""
        try:
            compiled = self.compiled.result()
        # Raise a new exception each time: several sequences may share this one.
        except InvalidRequest as error:
            raise InvalidRequest.of(*error.violations) from error
        except (EngineFault, CancelledError) as error:
            raise EngineFault(str(error)) from error
        return Matcher(compiled.inner, compiled.vocabulary, self.end_token_ids)


class Matchers:
    """Cache of compiled grammars. Thread-safe. Loads the vocabulary with the first grammar."""

    def __init__(
        self,
        load_vocabulary: Callable[[], GrammarVocabulary],
        executor: Executor,
        num_kept: int = NUM_KEPT,
    ) -> None:
        """executor: single thread that compiles grammars; owned by this object.

        load_vocabulary: called once in that thread; again only if it raised EngineFault.
        """
        self._load = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._executor = executor

    def submit(self, sampling: Sampling) -> MatcherFuture:
        """Start to compile the grammar of a sequence, if it has one that is not cached. Does not
        wait."""
        return MatcherFuture(self._future(sampling.grammar), sampling.stop_token_ids)

    def close(self) -> None:
        """Stop compiling."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _future(self, data: bytes) -> Future[CompiledGrammar]:
        with self._lock:
            future = self._compiled.get(data)
            if future is None:
                future = self._compiled[data] = self._executor.submit(self._compile, data)
                if len(self._compiled) > self._num_kept:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(data)
            return future

    def _compile(self, data: bytes) -> CompiledGrammar:
        """Runs in the compiling thread."""
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            grammar = Grammar.from_bytes(data)
        except InvalidRequest:
            raise
        except Exception as error:
            # Fail only the sequences with this grammar, not the engine's thread.
            raise EngineFault(f"structured output: {error}") from error
        try:
            inner = compile_grammar(grammar, self._vocabulary)
        except Exception as error:
            raise refusal(str(error)) from error
        return CompiledGrammar(inner, self._vocabulary)


class HasMatcherFuture(Protocol):
    """A sequence or batch member that may need a grammar."""

    @property
    def matcher_future(self) -> MatcherFuture | None: ...


HasMatcherFutureT = TypeVar("HasMatcherFutureT", bound=HasMatcherFuture)


def with_grammar_ready(members: Sequence[HasMatcherFutureT]) -> list[HasMatcherFutureT]:
    """Members without a grammar or with a compiled one. If there are none, waits up to MAX_WAIT_S
    for one.

    Members left out are retried in the next step, so that the engine's thread stays responsive.
    """
    ready = [
        member
        for member in members
        if member.matcher_future is None or member.matcher_future.is_ready
    ]
    if ready or not members:
        return ready
    wait(
        [member.matcher_future.compiled for member in members if member.matcher_future],
        timeout=MAX_WAIT_S,
        return_when=FIRST_COMPLETED,
    )
    return [
        member for member in members if member.matcher_future and member.matcher_future.is_ready
    ]
