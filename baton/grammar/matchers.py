"""A worker's matchers: each grammar is compiled once, in a thread of its own, while its first prompt is computed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future

from llguidance import LLMatcher

from baton.errors import EngineFault
from baton.grammar.grammar import Grammar
from baton.grammar.matcher import Matcher, compile_grammar
from baton.grammar.vocabulary import GrammarVocabulary
from baton.types import Sampling

#: Compiled grammars kept for the next sequences that use them.
NUM_KEPT = 64


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
        self._compiled: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._executor = executor

    def prepare(self, sampling: Sampling) -> None:
        """Begin to compile a sequence's grammar, if it has one that is not known. Does not wait."""
        if sampling.grammar:
            self._future(sampling.grammar)

    def is_ready(self, sampling: Sampling) -> bool:
        """Whether `matcher` would not wait; begins to compile the grammar if it is not known."""
        return not sampling.grammar or self._future(sampling.grammar).done()

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """A matcher before the first token of output; None if the sequence has no grammar.

        Waits until the grammar is compiled. Raises EngineFault if it cannot be.
        """
        if not sampling.grammar:
            return None
        try:
            compiled = self._future(sampling.grammar).result()
        except EngineFault as error:
            raise EngineFault(error.message) from error  # its own: several sequences may have it
        if self._vocabulary is None:
            raise EngineFault("structured output: a grammar without a vocabulary")
        return Matcher(compiled, self._vocabulary, sampling.stop_token_ids)

    def close(self) -> None:
        """Compile no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _future(self, data: bytes) -> Future[LLMatcher]:
        with self._lock:
            future = self._compiled.get(data)
            if future is None:
                future = self._compiled[data] = self._executor.submit(self._compile, data)
                if len(self._compiled) > self._num_kept:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(data)
            return future

    def _compile(self, data: bytes) -> LLMatcher:
        """In the compiling thread."""
        if self._vocabulary is None:
            self._vocabulary = self._load()
        grammar = Grammar.from_bytes(data)
        try:
            return compile_grammar(grammar, self._vocabulary)
        except ValueError as error:
            raise EngineFault(f"structured output: {error}") from None
