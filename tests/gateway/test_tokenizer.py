"""The tokenizer, and what is read from the model's files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from baton.errors import ConfigError
from gateway.intake.tokenizer import Tokenizer, TokenizerFacts, load_tokenizer
from gateway.output.detokenizer import Detokenizer

FACTS = TokenizerFacts(frozenset(), {}, None, None, Path())


def byte_level() -> HfTokenizer:
    """A byte per token, ids 0..255; <s> is 256 and </s> 257."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = HfTokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return tokenizer


def sentence_piece() -> HfTokenizer:
    """Words that bring their space, and bytes as a fallback: the decoder of Llama 2."""
    vocab = {"<unk>": 0, "▁a": 1, "▁": 2, "b": 3} | {f"<0x{i:02X}>": 4 + i for i in range(256)}
    tokenizer = HfTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 260), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    skip_special_tokens=st.booleans(),
)
def test_byte_level_pieces_are_the_whole_text(
    ids: list[int], cuts: list[int], skip_special_tokens: bool
) -> None:
    tokenizer = Tokenizer(byte_level(), FACTS)
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens))
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    pieces = [ids[a:b] for a, b in pairwise(edges)]
    text = "".join(map(detokenizer.feed, pieces)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens)


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["▁a", "▁", "b", "你", "é", "𝄞"]), max_size=20),
    size=st.integers(1, 12),
)
def test_sentence_piece_pieces_are_the_whole_text(words: list[str], size: int) -> None:
    tokenizer = Tokenizer(sentence_piece(), FACTS)
    vocab = {"▁a": [1], "▁": [2], "b": [3]}
    ids = [i for w in words for i in vocab.get(w) or [4 + byte for byte in w.encode()]]
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids, True))
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
    text = "".join(map(detokenizer.feed, pieces)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, True)


async def test_special_tokens_are_added_as_the_post_processor_does() -> None:
    tokenizer = Tokenizer(byte_level(), FACTS)
    with_special = await tokenizer.encode("hi", add_special_tokens=True)
    without = await tokenizer.encode("hi", add_special_tokens=False)
    assert with_special == (256, *without)
    long_text = "hi " * 20_000
    assert len(await tokenizer.encode(long_text, add_special_tokens=False)) == len(long_text)


async def test_the_files_truncation_and_padding_are_not_applied() -> None:
    hf_tokenizer = byte_level()
    hf_tokenizer.enable_truncation(3)
    hf_tokenizer.enable_padding(length=50)
    assert len(await Tokenizer(hf_tokenizer, FACTS).encode("hello", add_special_tokens=False)) == 5


async def test_ids_without_text_have_none() -> None:
    tokenizer = Tokenizer(byte_level(), FACTS)
    (letter,) = await tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.decode([letter, 100_000, 2**32 - 1, 257], True) == "a"
    assert await tokenizer.decode_all([letter] * 5000, True) == "a" * 5000


def write(path: Path, name: str, value: object) -> None:
    (path / name).write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_end_tokens_come_from_the_first_file_that_tells(folder: Path) -> None:
    assert load_tokenizer(str(folder)).facts.eos_token_ids == frozenset()
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    facts = load_tokenizer(str(folder)).facts
    assert facts.eos_token_ids == {257}
    assert facts.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}
    write(folder, "config.json", {"eos_token_id": 7, "max_position_embeddings": 99})
    facts = load_tokenizer(str(folder)).facts
    assert facts.eos_token_ids == {7}
    assert facts.max_model_len == 99
    write(folder, "generation_config.json", {"eos_token_id": [8, 9]})
    assert load_tokenizer(str(folder)).facts.eos_token_ids == {8, 9}


def test_the_chat_template_is_found_where_models_keep_it(folder: Path) -> None:
    assert load_tokenizer(str(folder)).facts.chat_template is None
    write(folder, "tokenizer_config.json", {"chat_template": "in config"})
    assert load_tokenizer(str(folder)).facts.chat_template == "in config"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "the default"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(str(folder)).facts.chat_template == "the default"
    (folder / "chat_template.jinja").write_text("a file")
    assert load_tokenizer(str(folder)).facts.chat_template == "a file"


def test_bad_files_are_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_tokenizer(str(folder))


async def test_words_are_told_in_every_way_that_the_text_may_hold_them() -> None:
    vocab = {"Ġ": 0, "d": 1, "o": 2, "do": 3, "Ġdo": 4, "x": 5}
    tokenizer = HfTokenizer(models.BPE(vocab, [("d", "o"), ("Ġ", "do")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = Tokenizer(tokenizer, FACTS)
    # " do" is a token of its own; " x" ends with the token of "x", which tells it already.
    assert await words.ways_to_write(["do", " do", "x", "dx"]) == (
        ((3,), (4,)),
        ((3,), (4,)),
        ((5,),),
        ((1, 5),),
    )
    assert await words.ways_to_write([" "]) == (((0,),),)
    many = await words.ways_to_write(["do"] * 1000)
    assert many == (((3,), (4,)),) * 1000


async def test_a_word_of_nothing_that_the_tokenizer_knows_has_no_tokens() -> None:
    words = Tokenizer(HfTokenizer(models.BPE({"a": 0}, [])), FACTS)
    assert await words.ways_to_write(["?"]) == (((),),)
