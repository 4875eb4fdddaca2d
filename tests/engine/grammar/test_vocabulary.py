"""Vocabularies of tokenizers of several makes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from baton.errors import EngineFault
from engine.grammar import Grammar, load_vocabulary
from tests.support.grammar_walks import ids_of, matcher_of, walk

NAMES = ["<unk>", "<s>", "</s>"]


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: spaces are a sign of their own, and what has no token is written by its
    bytes."""
    texts = [*NAMES, *(f"<0x{byte:02X}>" for byte in range(256)), *'▁abcx{}[]":,0123456789']
    merges = [("▁", "a"), ("▁a", "b")]
    texts += ["".join(merge) for merge in merges]
    vocab = {text: i for i, text in enumerate(texts)}
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(NAMES)
    return made


@pytest.mark.parametrize("vocab_size", [None, 270, 290, 320])
def test_bytes_and_spaces_are_read_as_they_are_decoded(
    tmp_path: Path, vocab_size: int | None
) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path, vocab_size)
    for seed in range(5):
        output = walk(
            matcher_of(Grammar.choice(["ab é", "a ab x\n"]), vocabulary, (2,)), random.Random(seed)
        )
        assert output[-1] == 2
        assert tokenizer.decode(output) in ("ab é", "a ab x\n")


def test_a_number_above_zero_is_never_zero(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path)
    grammar = Grammar.json_schema({"type": "number", "exclusiveMinimum": 0})
    for seed in range(40):
        output = walk(matcher_of(grammar, vocabulary, (2,)), random.Random(seed))
        assert float(tokenizer.decode(output)) > 0


def test_special_tokens_are_no_text(tmp_path: Path) -> None:
    byte_fallback_tokenizer().save(str(tmp_path / "tokenizer.json"))
    anything = matcher_of(Grammar.regex("(.|\n)*"), load_vocabulary(tmp_path), (2,))
    assert [token for token in ids_of(anything.allowed()) if token < len(NAMES)] == [2]


def test_a_tokenizer_whose_texts_cannot_be_known_is_an_error(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineFault, match="not possible"):
        load_vocabulary(tmp_path)
