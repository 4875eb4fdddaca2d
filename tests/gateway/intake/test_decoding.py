"""The text of a stream of tokens is that of all of them decoded at once, for tokenizers of every
kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.types import FinishReason, Sample
from gateway.intake.decoding import Decoding, decoding_of
from gateway.intake.request import TextOptions
from gateway.output.output import ChoiceOutput, Detokenizer

CORPUS = ["the cat sat on the mat, and it did not 'eat' the rat .", "你好 wörld é naïve 𝄞 🙂🙂"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = ["\u2581the", "\u2581", "cat", "s", "\u2581\u2581a", "\u2581你", "\ufffd", "<0xZZ>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and tekken: merges of bytes, cut within characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, show_progress=False, special_tokens=["<s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentence_piece(decoder: decoders.Decoder) -> Tokenizer:
    """BPE with byte fallback and a space before each word."""
    vocab = {text: i for i, text in enumerate(["<unk>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


def llama_2() -> Tokenizer:
    """As Llama 2 and Mistral: the text loses the space that it begins with."""
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    return sentence_piece(decoders.Sequence(parts))


def gemma() -> Tokenizer:
    """As Gemma: the text keeps it."""
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentence_piece(decoders.Sequence(parts))


def unigram() -> Tokenizer:
    """Unigram with byte fallback."""
    vocab = [(text, -1.0) for text in ["<unk>", *BYTES, *WORDS]]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5: Unigram without."""
    vocab = [(text, -1.0) for text in ["<unk>", *WORDS]]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "the", "##s", "##e", "cat", ".", ",", "'", "do", "n't", "你", "##你"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_ends() -> Tokenizer:
    """As CLIP and the first GPT: a token says that a word ends."""
    words = ["the</w>", "c", "at</w>", "s", "你</w>", "<unk>"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder() -> Tokenizer:
    words = ["[UNK]", "the", "cat", "你"]
    return Tokenizer(models.WordLevel({t: i for i, t in enumerate(words)}, unk_token="[UNK]"))


KINDS = [
    byte_level,
    llama_2,
    gemma,
    unigram,
    metaspace,
    word_piece,
    word_ends,
    no_decoder,
]


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer


TOKENIZERS = {make.__name__: with_special_tokens(make()) for make in KINDS}
DECODINGS = {
    (name, skips): decoding_of(tokenizer, skip_special_tokens=skips)
    for name, tokenizer in TOKENIZERS.items()
    for skips in (False, True)
}
by_kind = pytest.mark.parametrize("name", TOKENIZERS)

#: Positions in a vocabulary, those behind its end without a token.
PLACES = st.lists(st.floats(0, 1.02), max_size=30)
#: Texts of characters of one to four bytes.
TEXTS = st.text(st.sampled_from("aé你𝄞 🙂\ufffd"), max_size=12)


def text_in_pieces(
    decoding: Decoding, ids: Sequence[int], cuts: Sequence[int], *, is_continuation: bool = False
) -> str:
    detokenizer = Detokenizer(decoding, is_continuation=is_continuation)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.feed(ids[a:b]) for a, b in pairwise(edges)]
    return "".join(pieces) + detokenizer.flush()


def ids_of(name: str, places: Sequence[float], text: str) -> list[int]:
    """Some tokens of a vocabulary, and the bytes of a text where it has tokens for them."""
    tokenizer = TOKENIZERS[name]
    ids = [int(place * tokenizer.get_vocab_size()) for place in places]
    texts = [BYTES[byte] for byte in text.encode()]
    of_bytes = [i for t in texts if (i := tokenizer.token_to_id(t)) is not None]
    middle = len(ids) // 2
    return ids[:middle] + (of_bytes or tokenizer.encode(text).ids) + ids[middle:]


@by_kind
@settings(deadline=None)
@given(
    places=PLACES, text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8), skips=st.booleans()
)
def test_pieces_are_the_whole_text(
    name: str, places: list[float], text: str, cuts: list[int], skips: bool
) -> None:
    ids = ids_of(name, places, text)
    whole = TOKENIZERS[name].decode(ids, skip_special_tokens=skips)
    decoding = DECODINGS[name, skips]
    assert text_in_pieces(decoding, ids, cuts) == whole
    assert text_in_pieces(decoding, ids, range(len(ids))) == whole


@by_kind
def test_pieces_are_the_whole_text_wherever_it_is_cut(name: str) -> None:
    ids = ids_of(name, [0.9, 0.5, 0.99], "a你 é🙂\ufffdz")
    whole = TOKENIZERS[name].decode(ids)
    for cut in range(len(ids) + 1):
        assert text_in_pieces(DECODINGS[name, True], ids, [cut]) == whole


def test_a_byte_that_belongs_to_no_character_changes_its_whole_run() -> None:
    # What stood in for the streamed text before: 你 was released, and never taken back.
    tokenizer, decoding = TOKENIZERS["llama_2"], DECODINGS["llama_2", True]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (*"你".encode(), 0xFF)]
    assert tokenizer.decode(ids) == "\ufffd" * 4
    detokenizer = Detokenizer(decoding)
    assert [detokenizer.feed([i]) for i in ids] == [""] * 4
    assert detokenizer.flush() == "\ufffd" * 4


@pytest.mark.parametrize("name", ["llama_2", "gemma", "unigram", "metaspace"])
@settings(deadline=None)
@given(places=PLACES, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_text_that_goes_on_keeps_the_space_it_begins_with(
    name: str, places: list[float], cuts: list[int]
) -> None:
    tokenizer, decoding = TOKENIZERS[name], DECODINGS[name, True]
    the = tokenizer.token_to_id("\u2581the")
    ids = [the, *ids_of(name, places, "")]
    text = text_in_pieces(decoding, ids, cuts, is_continuation=True)
    assert text.startswith(" the")
    assert text == tokenizer.decode([the, *ids])[len(tokenizer.decode([the])) :]


@pytest.mark.parametrize("name", ["byte_level", "llama_2", "unigram"])
@settings(deadline=None)
@given(places=PLACES, text=TEXTS, stop=st.text(st.sampled_from("aé你𝄞 "), min_size=1, max_size=3))
def test_stop_strings_are_found_in_the_whole_text(
    name: str, places: list[float], text: str, stop: str
) -> None:
    ids = [*ids_of(name, places, text), *ids_of(name, [], f"a{stop}")]
    output = ChoiceOutput(DECODINGS[name, True], TextOptions(stop=(stop,)), 0)
    sent = ""
    for index, token_id in enumerate(ids):
        finish = FinishReason.LENGTH if index == len(ids) - 1 else FinishReason.NONE
        output.add(index, (Sample(token_id),), finish)
        piece = output.take()
        sent += piece.text if piece else ""
        if piece and piece.finish:
            break
    whole = TOKENIZERS[name].decode(ids)
    assert (output.finish is FinishReason.STOP) == (stop in whole)
    assert sent == whole.split(stop, 1)[0]
