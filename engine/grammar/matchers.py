"""A worker's matchers: each grammar is compiled once, in a thread of its own, while its first
prompt is computed."""

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

#: Compiled grammars kept for the next sequences that use them.
NUM_KEPT = 64

#: How long a step waits for a grammar when there is nothing else to do, in seconds.
MAX_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What matchers are copied from."""

    inner: LLMatcher
    vocabulary: GrammarVocabulary


@dataclass(frozen=True, slots=True)
class MatcherFuture:
    """The matcher that a sequence will need, and its choices: its grammar is known, or is being
    compiled."""

    compiled: Future[CompiledGrammar]
    end_token_ids: frozenset[int]

    @property
    def is_ready(self) -> bool:
        """Whether `matcher` would not wait."""
        return self.compiled.done()

    def matcher(self) -> Matcher:
        """A new matcher, before the first token of output. Raises InvalidRequest if the grammar
        cannot be compiled, EngineFault if none can."""
        try:
            compiled = self.compiled.result()
        # A new error each time: several sequences may have it.
        except InvalidRequest as error:
            raise InvalidRequest.of(*error.violations) from error
        except (EngineFault, CancelledError) as error:
            raise EngineFault(str(error)) from error
        return Matcher(compiled.inner, compiled.vocabulary, self.end_token_ids)


class Matchers:
    """May be used from any thread. Loads the vocabulary when the first grammar comes."""

    def __init__(
        self,
        load_vocabulary: Callable[[], GrammarVocabulary],
        executor: Executor,
        num_kept: int = NUM_KEPT,
    ) -> None:
        """executor: of one thread, where grammars are compiled; owned from now on.

        load_vocabulary: called once, in that thread, unless it raises EngineFault.
        """
        self._load = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._executor = executor

    def submit(self, sampling: Sampling) -> MatcherFuture:
        """Begin to compile the grammar of a sequence that has one, unless it is known. Does not
        wait."""
        return MatcherFuture(self._future(sampling.grammar), sampling.stop_token_ids)

    def close(self) -> None:
        """Compile no more."""
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
        """In the compiling thread."""
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            grammar = Grammar.from_bytes(data)
        except InvalidRequest:
            raise
        except Exception as error:
            # Whatever it is, it is charged to the sequences that have this grammar, not to the
            # engine's thread.
            raise EngineFault(f"structured output: {error}") from error
        try:
            inner = compile_grammar(grammar, self._vocabulary)
        except Exception as error:
            raise refusal(str(error)) from error
        return CompiledGrammar(inner, self._vocabulary)


class HasMatcherFuture(Protocol):
    """Something that a step may compute."""

    @property
    def matcher_future(self) -> MatcherFuture | None: ...


HasMatcherFutureT = TypeVar("HasMatcherFutureT", bound=HasMatcherFuture)


def with_grammar_ready(members: Sequence[HasMatcherFutureT]) -> list[HasMatcherFutureT]:
    """Those whose grammars, if they have any, are compiled. If there is nobody else, waits a little
    for one.

    What takes longer is asked for again in the next step, so that the engine's thread shows signs
    of life meanwhile.
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
