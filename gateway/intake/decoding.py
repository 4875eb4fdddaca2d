"""How a tokenizer's ids become text, so that a stream of them becomes the same text as all at
once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial

import tokenizers

#: Token ids to text; special tokens and ids without text give none.
Decode = Callable[[Sequence[int]], str]

#: What an id is to a decoder with byte fallback. Ids beyond Decoding.kinds are silent, too.
TEXT, BYTE, SILENT = range(3)

#: How byte-fallback decoders know their tokens.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

#: Texts of single ids that are kept, those of the latest ones.
_NUM_KEPT = 65_536

#: The space in the tokens of SentencePiece.
_SPACE = "\u2581"


class Decoding:
    """text_of: of any ids. text_of_one: of one id, given as a tuple of it, from a table.

    kinds: one of TEXT, BYTE and SILENT for each id, if the decoder has a byte fallback: it
    decodes a run of BYTE tokens, with SILENT ones among them, as a whole, and each byte to U+FFFD
    if any of them belongs to no character. Empty for all other decoders, where text that is
    followed by a whole character stays as it is.

    lead: ids behind which a text keeps the space that the decoder takes away from its beginning;
    empty if it takes none away.
    """

    def __init__(self, text_of: Decode, kinds: bytes = b"", lead: tuple[int, ...] = ()) -> None:
        self.text_of = text_of
        self.kinds = kinds
        self.lead = lead
        self.text_of_one: Callable[[tuple[int]], str] = lru_cache(_NUM_KEPT)(text_of)


def decoding_of(tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> Decoding:
    """That of a tokenizer; special tokens are left out of the text, or not."""
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    kinds = b""
    if '"ByteFallback"' in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        added = tokenizer.get_added_tokens_decoder().values()
        left_out = {token.content for token in added if token.special and skip_special_tokens}
        num_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
        kinds = bytes(_kind_of(tokenizer.id_to_token(i), left_out) for i in range(num_ids))
    return Decoding(decode, kinds, _lead(tokenizer))


def _kind_of(token: str | None, left_out: Collection[str]) -> int:
    if token is None or token in left_out:
        return SILENT
    return BYTE if _BYTE_TOKEN.fullmatch(token) else TEXT


def _lead(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    vocab = tokenizer.get_vocab().items()
    word = next((i for text, i in vocab if text[:1] == _SPACE and text.strip(_SPACE)), None)
    if word is None or tokenizer.decode([word, word]) == 2 * tokenizer.decode([word]):
        return ()
    return (word,)
