"""Matches one output against its grammar and computes the allowed next tokens."""

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

#: Substrings of llguidance's errors for a grammar that exceeds `limits`.
_COSTLY = ("TooComplex", "too many states", "too many expressions", "Current row has")

#: Start of the grammar quoted line by line in an error text.
_SOURCE_LINES = re.compile(r"\n\s*\d+ \| ")


def limits() -> LLParserLimits:
    """Resource limits of a grammar. A lexer state takes about 2 KB; a step may take about 20 ms;
    errors do not quote the output."""
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

    `end_token_ids` are allowed only where the output is complete; if it can only end, nothing else
    is allowed. Elsewhere they are forbidden even if the grammar accepts their text, unless no other
    token is allowed. Every method raises InvalidRequest once the grammar exceeds its limits; the
    output cannot continue then. Gateways reject most such grammars in advance, but cannot detect
    all.
    """

    def __init__(
        self, inner: LLMatcher, vocabulary: GrammarVocabulary, end_token_ids: Collection[int]
    ) -> None:
        """inner: from compile_grammar, not modified; may be shared by many outputs."""
        self._inner = inner.deep_copy()
        self._vocabulary = vocabulary
        self._ends = frozenset(end_token_ids)
        self._end_bits = vocabulary.bits(self._ends)
        self._mask: int | None = None
        self.num_tokens = 0
        """Tokens consumed so far, less those rolled back."""
        self.is_over = False
        """Whether the output has ended."""

    @property
    def is_complete(self) -> bool:
        """Whether the output so far satisfies the grammar."""
        return bool(self._inner.is_accepting())

    def allowed(self) -> bytes:
        """Mask of allowed next tokens, at least one: bit t % 8 of byte t // 8 is token t.

        Raises InvalidRequest, too, if no token of the model continues the grammar.
        """
        return self._vocabulary.to_bytes(self._allowed_bits())

    def allows(self, token_id: int) -> bool:
        """Whether `token_id` may come next."""
        return bool(self._allowed_bits() >> token_id & 1)

    def advance(self, token_id: int) -> None:
        """Consume the next token. Raises EngineFault if it is not allowed."""
        if self.is_over:
            raise EngineFault("structured output: it goes on after its end")
        self._mask = None
        if token_id in self._ends and self.is_complete:
            self.is_over = True
        elif not self._inner.consume_token(token_id):
            raise self._fault(f"token {token_id} is not what its grammar allows")
        self.num_tokens += 1

    def advance_many(self, token_ids: Sequence[int]) -> None:
        """Consume tokens in order, as advance does."""
        for token_id in token_ids:
            self.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""
        if num_tokens == 0:
            return
        num_inner = num_tokens - self.is_over
        self._mask = None
        self.is_over = False
        self.num_tokens -= num_tokens
        if num_inner and not self._inner.rollback(num_inner):
            raise self._fault(f"{num_tokens} tokens cannot be taken back")

    def fork(self) -> Matcher:
        """An independent copy."""
        twin = Matcher(self._inner, self._vocabulary, self._ends)
        twin._mask, twin.num_tokens, twin.is_over = self._mask, self.num_tokens, self.is_over
        return twin

    def allowed_along(self, drafts: Sequence[int]) -> tuple[bytes, ...]:
        """Masks before the first draft, after it, after the second, ...; the matcher itself does
        not change.

        Returns one mask more than there are usable drafts. Drafts are cut at the first one that is
        not allowed, that ends the output, or after which the grammar exceeds its limits.
        """
        masks = [self.allowed()]
        if not drafts:
            return tuple(masks)
        scout = self.fork()  # exceeding the limits breaks a matcher permanently
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
        """The grammar's error if it exceeds its limits or allows no token; else a fault of ours
        with text `default`, such as for a token that is not allowed."""
        text = explain(self._inner, default)
        is_its = default == _NO_TOKEN or text == _TOO_COSTLY
        return refusal(text) if is_its else EngineFault(f"structured output: {text}")


def refusal(text: str) -> InvalidRequest:
    """Error for an invalid grammar of any kind."""
    return InvalidRequest.of(FieldViolation("sampling.structured_output", text))


def explain(inner: LLMatcher, default: str) -> str:
    """One-line reason of a matcher's failure; `default` if the library gives none."""
    text = _SOURCE_LINES.split(inner.get_error().replace("<non-verbose/>", ""))[0]
    text = " ".join(text.rsplit("\nerror: ", 1)[-1].split())
    if any(mark in text for mark in _COSTLY):
        return _TOO_COSTLY
    if not text or text.startswith("NoExtension"):
        return default
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> LLMatcher:
    """Compile a grammar and prepare its first token. Blocks without the GIL. Raises ValueError with
    one line for an invalid grammar."""
    inner = LLMatcher(vocabulary.tokenizer, grammar.to_llguidance(), limits=limits(), log_level=0)
    if not inner.is_error():
        # Fills caches that copies share, so that each output's first token is fast.
        inner.compute_bitmask()
    if inner.is_error():
        raise ValueError(explain(inner, "no text matches it"))
    return inner
