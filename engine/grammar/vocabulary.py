"""Token texts of a model in llguidance's form, built once per process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from baton.errors import EngineFault

#: Text of an extra token beyond the model's, which marks the end of output in grammars.
_END_TEXT = "<|baton: end of output|>"

#: Letters of a synthetic vocabulary: besides all single bytes it has their pairs, so that tokens of
#: several bytes occur.
_LETTERS = 'etaoinshrdlu 0123456789,:{}[]"'


class GrammarVocabulary:
    """A tokenizer's vocabulary for matchers. Immutable and thread-safe."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, num_known: int) -> None:
        """tokenizer: includes the extra end token. vocab_size: number of the model's ids; ids from
        num_known on have no text."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.num_mask_bytes = -(-vocab_size // 8)
        self._allowable = (1 << min(num_known, vocab_size)) - 1 & ~(1 << tokenizer.eos_token)

    def limited(self, mask: bytes) -> int:
        """An llguidance mask without the end token and without ids that model or tokenizer lack;
        bit t is token t."""
        return int.from_bytes(mask, "little") & self._allowable

    def bits(self, token_ids: Iterable[int]) -> int:
        """Mask of these tokens; ids outside the vocabulary are ignored."""
        bits = 0
        for token_id in token_ids:
            if 0 <= token_id < self.vocab_size:
                bits |= 1 << token_id
        return bits

    def to_bytes(self, bits: int) -> bytes:
        """Encode a mask for SampleRow.allowed."""
        return bits.to_bytes(self.num_mask_bytes, "little")


def load_vocabulary(folder: Path, vocab_size: int | None = None) -> GrammarVocabulary:
    """Load tokenizer.json from a model's folder. Blocks about one second per 100,000 tokens.

    vocab_size: number of the model's ids, which may differ from the tokenizer's (the default).
    Raises EngineFault if the file is missing or unreadable.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EngineFault(f"no tokenizer.json in {folder.name}: structured output needs one")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception.
        raise EngineFault(f"{path.name} cannot be read: {error}") from error
    # Highest id + 1: some tokenizers have gaps.
    num_known = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens([_END_TEXT])
    end_id = tokenizer.token_to_id(_END_TEXT)
    if end_id is None:
        raise EngineFault("the tokenizer takes no further token: structured output needs one")
    num_ids = max(num_known, end_id + 1, vocab_size or 0)
    try:
        made = LLTokenizer(tokenizer.to_str(), n_vocab=num_ids, eos_token=end_id)
    except ValueError as error:
        raise EngineFault(f"structured output is not possible with it: {error}") from None
    if vocab_size is not None and vocab_size < num_known:
        return GrammarVocabulary(_first_tokens(made, vocab_size), vocab_size, vocab_size)
    return GrammarVocabulary(made, vocab_size or num_known, num_known)


def synthetic_vocabulary(vocab_size: int) -> GrammarVocabulary:
    """Vocabulary for engines without a tokenizer: ids 0..255 are the single bytes, followed by
    short texts."""
    return GrammarVocabulary(_wrapped(synthetic_tokens(vocab_size), ()), vocab_size, vocab_size)


def synthetic_tokens(vocab_size: int) -> tuple[bytes, ...]:
    """The texts of a synthetic vocabulary's tokens, by id."""
    single = [bytes((byte,)) for byte in range(256)]
    pairs = [(a + b).encode() for a in _LETTERS for b in _LETTERS]
    padding = [b"<%d>" % i for i in range(max(0, vocab_size - len(single) - len(pairs)))]
    return tuple((single + pairs + padding)[:vocab_size])


class _Tokens:
    """Tokenizer interface that llguidance calls for a synthetic vocabulary. The last token is the
    end token."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        self.tokens = [*tokens, _END_TEXT.encode()]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [*special_token_ids, self.eos_token_id]
        special = set(special_token_ids)
        self._ids = {text: i for i, text in enumerate(tokens) if i not in special}
        self._max_num_bytes = max(map(len, tokens), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise `text` greedily, longest token first; bytes without a token are dropped."""
        ids: list[int] = []
        while text:
            pieces = (text[:n] for n in range(min(len(text), self._max_num_bytes), 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is not None:
                ids.append(self._ids[piece])
            text = text[len(piece or b"x") :]
        return ids


def _wrapped(tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Tokens(tokens, special_token_ids)))


def _first_tokens(tokenizer: LLTokenizer, num_tokens: int) -> LLTokenizer:
    """A tokenizer restricted to its first num_tokens: otherwise llguidance may force the others."""
    ids = range(num_tokens)
    texts = [tokenizer.decode_bytes([i]) for i in ids]
    return _wrapped(texts, [i for i in ids if tokenizer.is_special_token(i)])
