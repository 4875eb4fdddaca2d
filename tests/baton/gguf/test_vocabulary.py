"""The tokenizer of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.errors import ConfigError, UnsupportedModel
from baton.gguf.reader import GgufFile
from baton.gguf.vocabulary import end_tokens, make_tokenizer, tokenizer_config
from gateway.intake.tokenizer import load_tokenizer
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny_model

TEXTS = ("Hello  world 123", "naïve café 你好 🙂\r\n\r\n  x", "a<|end|>b", "", " x", "it's 4567")
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [
    *"▁helowrd",
    "he",
    "ll",
    "llo",
    "hello",
    "▁hello",
    "wo",
    "wor",
    "ld",
    "world",
    "▁world",
    "<|end|>",
]


def file_with(**fields: Any) -> GgufFile:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return GgufFile(Path("tiny.gguf"), metadata, {})


def sentence_piece(**fields: Any) -> GgufFile:
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(WORDS) - 1), 4]
    return file_with(
        model="llama",
        tokens=PIECES + WORDS,
        scores=[0.0] * len(PIECES) + [-float(i) for i in range(len(WORDS))],
        token_type=kinds,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )


def test_sentence_piece_gives_its_texts_back() -> None:
    tokenizer = make_tokenizer(sentence_piece())
    assert tokenizer is not None
    encoded = tokenizer.encode("hello world")
    assert encoded.tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("a<|end|>b", add_special_tokens=False).tokens[-3] == "<|end|>"
    for text in set(TEXTS) - {"a<|end|>b"}:  # a space goes before what follows a token, too
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentence_piece_is_that_of_transformers() -> None:
    """Its conversion of the same vocabulary and scores."""
    from transformers.convert_slow_tokenizer import generate_merges

    tokenizer = make_tokenizer(sentence_piece())
    assert tokenizer is not None
    file = sentence_piece().metadata
    vocab = {token: i for i, token in enumerate(file["tokenizer.ggml.tokens"])}
    scores = dict(zip(vocab, file["tokenizer.ggml.scores"], strict=True))
    ours = json.loads(tokenizer.to_str())["model"]["merges"]
    assert {tuple(pair) for pair in ours} == set(generate_merges(vocab, scores))
    ranks = [scores["".join(pair)] for pair in ours]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_goes_before_texts_as_the_file_says(prefix: bool) -> None:
    tokenizer = make_tokenizer(sentence_piece(add_space_prefix=prefix, add_bos_token=False))
    assert tokenizer is not None
    assert tokenizer.encode("hello").tokens == ["▁hello" if prefix else "hello"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["it", "'s", "Ġ4567", "ĠX"]),
        ("smollm", ["it", "'s", "Ġ", "4", "5", "6", "7", "ĠX"]),
        ("llama-bpe", ["it", "'s", "Ġ", "456", "7", "ĠX"]),
        ("qwen2", ["it", "'s", "Ġ", "4", "5", "6", "7", "ĠX"]),
        ("tekken", ["it", "'s", "Ġ", "4", "5", "6", "7", "ĠX"]),
        ("gpt-4o", ["it's", "Ġ", "456", "7", "ĠX"]),
    ],
)
def test_words_of_a_byte_level_vocabulary(pre: str, words: list[str]) -> None:
    tokenizer = make_tokenizer(file_with(model="gpt2", pre=pre, tokens=["a"], merges=[]))
    assert tokenizer is not None
    found = tokenizer.pre_tokenizer.pre_tokenize_str("it's 4567 X")
    assert [word for word, _ in found] == words


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"pre='klingon'.*gpt-2"):
        make_tokenizer(file_with(model="gpt2", pre="klingon", tokens=["a"], merges=[]))
    with pytest.raises(UnsupportedModel, match="model='bert'"):
        make_tokenizer(file_with(model="bert", tokens=["a"]))
    assert make_tokenizer(file_with(model="no_vocab")) is None


def test_end_tokens_and_names() -> None:
    file = sentence_piece(eot_token_id=3)
    assert end_tokens(file) == [2, 3]
    assert tokenizer_config(file) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_gateway_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_tiny_model(tmp_path / "dense")
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    loaded = load_tokenizer(str(path))
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*TEXTS, "<|im_start|>user\nhi<|im_end|>"):
        ids = theirs.encode(text).ids
        assert loaded.decode(ids, skip_special_tokens=False) == text
    assert loaded.facts.chat_template == CHAT_TEMPLATE
    assert loaded.facts.eos_token_ids == {theirs.token_to_id("<|endoftext|>")}
    assert loaded.facts.max_model_len == 256
    (tmp_path / "other.gguf").write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        load_tokenizer(str(tmp_path / "other.gguf"))
