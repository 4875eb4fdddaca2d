"""Follows one output through its grammar, and says which tokens may come next."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from llguidance import LLMatcher, LLParserLimits

from baton.errors import BatonError, EngineFault, FieldViolation, InvalidRequest
from engine.grammar.grammar import Grammar
from engine.grammar.vocabulary import GrammarVocabulary

_MAX_ERROR_CHARS = 300

_TOO_COSTLY = "its grammar costs more to follow than is allowed; make it simpler"
_NO_TOKEN = "no token of the model continues it"

#: What errors say of a grammar that goes beyond `limits`.
_COSTLY = ("TooComplex", "too many states", "too many expressions", "Current row has")

#: Where an error's text begins to quote the grammar, line by line.
_SOURCE_LINES = re.compile(r"\n\s*\d+ \| ")


def limits() -> LLParserLimits:
    """What a grammar may cost. Lexer states take some 2 KB each; a step may use about 20 ms; errors
    quote no output."""
    return LLParserLimits(
        max_lexer_states=30_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Matcher:
    """The state of one output. Belongs to one thread at a time.

    An output may end, by one of `end_token_ids`, only where it is complete; where it can only end,
    nothing else is allowed. Hence those tokens are not allowed elsewhere, though a grammar might
    take their text, unless nothing else is. Every method raises InvalidRequest once the grammar has
    cost more than its limits; that output cannot go on. What gateways try of a grammar shows most
    of those that do, and cannot show all.
    """

    def __init__(
        self, inner: LLMatcher, vocabulary: GrammarVocabulary, end_token_ids: Collection[int]
    ) -> None:
        """Leaves `inner` as it is: what compile_grammar made, for one or for many outputs."""
        self._inner = inner.deep_copy()
        self._vocabulary = vocabulary
        self._ends = frozenset(end_token_ids)
        self._end_bits = vocabulary.bits(self._ends)
        self._mask: int | None = None
        self.num_tokens = 0
        """Tokens taken since it was made, and not taken back."""
        self.is_over = False
        """Whether the output has ended: nothing may follow."""

    @property
    def is_complete(self) -> bool:
        """Whether the output, as it is, is what the grammar asks for."""
        return bool(self._inner.is_accepting())

    def allowed(self) -> bytes:
        """Bit t % 8 of byte t // 8 says whether token t may come next: at least one may.

        Raises InvalidRequest, too, if none may: no token of the model continues what the grammar
        wants.
        """
        return self._vocabulary.to_bytes(self._allowed_bits())

    def allows(self, token_id: int) -> bool:
        """Whether `token_id` may come next."""
        return bool(self._allowed_bits() >> token_id & 1)

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises EngineFault if it is not allowed."""
        if self.is_over:
            raise EngineFault("structured output: it goes on after its end")
        self._mask = None
        if token_id in self._ends and self.is_complete:
            self.is_over = True
        elif not self._inner.consume_token(token_id):
            raise self._fault(f"token {token_id} is not what its grammar allows")
        self.num_tokens += 1

    def advance_many(self, token_ids: Sequence[int]) -> None:
        """As advance, for each in turn."""
        for token_id in token_ids:
            self.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` that were taken."""
        if num_tokens == 0:
            return
        num_inner = num_tokens - self.is_over
        self._mask = None
        self.is_over = False
        self.num_tokens -= num_tokens
        if num_inner and not self._inner.rollback(num_inner):
            raise self._fault(f"{num_tokens} tokens cannot be taken back")

    def fork(self) -> Matcher:
        """A copy that goes its own way."""
        twin = Matcher(self._inner, self._vocabulary, self._ends)
        twin._mask, twin.num_tokens, twin.is_over = self._mask, self.num_tokens, self.is_over
        return twin

    def allowed_along(self, drafts: Sequence[int]) -> tuple[bytes, ...]:
        """Masks before the first draft, after it, after the second, ...; leaves the matcher as it
        is.

        One mask more than drafts that may be tried: they are cut at the first one that is not
        allowed, or that ends the output, since nothing follows it; or that leads to where the
        grammar costs too much.
        """
        masks = [self.allowed()]
        if not drafts:
            return tuple(masks)
        scout = self.fork()  # what costs too much spoils a matcher for good
        for token_id in drafts:
            if token_id in self._ends or not scout.allows(token_id):
                break
            try:
                scout.advance(token_id)
                masks.append(scout.allowed())
            except BatonError:
                break
        return tuple(masks)

    def _allowed_bits(self) -> int:
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def _compute(self) -> int:
        if self.is_over:
            raise EngineFault("structured output: it has ended, nothing may follow")
        is_complete = self.is_complete
        bits = 0
        if not self._inner.is_stopped():
            bits = self._vocabulary.limited(self._inner.compute_bitmask())
        if self._inner.is_error():
            raise self._fault(_NO_TOKEN)
        if is_complete:
            bits |= self._end_bits
        elif bits & ~self._end_bits:
            bits &= ~self._end_bits
        if not bits:
            raise refusal(_NO_TOKEN)
        return bits

    def _fault(self, default: str) -> BatonError:
        """The grammar's own, where it costs too much or nothing may follow; else one of ours, such
        as a token that it does not allow."""
        text = explain(self._inner, default)
        is_its = default == _NO_TOKEN or text == _TOO_COSTLY
        return refusal(text) if is_its else EngineFault(f"structured output: {text}")


def refusal(text: str) -> InvalidRequest:
    """Of a grammar, whatever it was given as."""
    return InvalidRequest.of(FieldViolation("sampling.structured_output", text))


def explain(inner: LLMatcher, default: str) -> str:
    """What went wrong in a matcher, in one line; `default` where the library only says that it
    stopped."""
    text = _SOURCE_LINES.split(inner.get_error().replace("<non-verbose/>", ""))[0]
    text = " ".join(text.rsplit("\nerror: ", 1)[-1].split())
    if any(mark in text for mark in _COSTLY):
        return _TOO_COSTLY
    if not text or text.startswith("NoExtension"):
        return default
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> LLMatcher:
    """Before the first token, and ready for it. Blocks, without the GIL. Raises ValueError, in one
    line, if there is none."""
    inner = LLMatcher(vocabulary.tokenizer, grammar.to_llguidance(), limits=limits(), log_level=0)
    if not inner.is_error():
        # Fills what its copies share, so that the first token costs no more than the others.
        inner.compute_bitmask()
    if inner.is_error():
        raise ValueError(explain(inner, "no text matches it"))
    return inner
