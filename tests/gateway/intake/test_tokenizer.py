"""The tokenizer, and what is read from the model's files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from baton.errors import ConfigError, InvalidRequest, Overloaded
from gateway.intake.text_tokenizer import read_tokenizer
from gateway.intake.tokenizer import Tokenizer, TokenizerFacts, TooManyTokens, load_tokenizer

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


async def test_special_tokens_are_added_as_the_post_processor_does() -> None:
    tokenizer = Tokenizer(byte_level(), FACTS)
    with_special = await tokenizer.encode("hi", add_special_tokens=True, max_tokens=3)
    without = await tokenizer.encode("hi", add_special_tokens=False, max_tokens=2)
    assert with_special == (256, *without)
    with pytest.raises(TooManyTokens, match="3 tokens"):
        await tokenizer.encode("hi", add_special_tokens=True, max_tokens=2)


class EncodesShort:
    """A tokenizer of the library's that takes no long text."""

    def __init__(self, whole: HfTokenizer) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        assert len(text) < 9000
        return self._whole.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
async def tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tokenizer]:
    """One that tokenizes nothing long in this process."""
    made = load_tokenizer(str(folder))
    monkeypatch.setattr(made, "_tokenizer", EncodesShort(made._tokenizer))
    yield made
    await made.close()


@pytest.mark.slow
async def test_long_texts_are_tokenized_by_another_process(tokenizer: Tokenizer) -> None:
    text = "hé 你好\n" * 20_000
    ids = await tokenizer.encode(text, add_special_tokens=True, max_tokens=2**20)
    assert ids[0] == 256
    assert await tokenizer.decode_all(ids, True) == text
    with pytest.raises(TooManyTokens) as caught:
        await tokenizer.encode(text, add_special_tokens=True, max_tokens=len(ids) - 1)
    assert caught.value.num_tokens == len(ids)


@pytest.mark.slow
async def test_a_text_that_takes_too_long_is_refused_and_others_are_served(folder: Path) -> None:
    made = load_tokenizer(str(folder))
    tokenizer = Tokenizer(
        read_tokenizer(str(folder / "tokenizer.json")), made.facts, encode_timeout_s=0.2
    )
    try:
        with pytest.raises(InvalidRequest, match=r"8000000 characters.*more than 0.2 s"):
            await tokenizer.encode("x" * 8_000_000, add_special_tokens=False, max_tokens=10)
        assert await tokenizer.encode("x" * 9000, add_special_tokens=False, max_tokens=9000)
    finally:
        await tokenizer.close()


async def test_no_more_long_texts_wait_than_may(folder: Path) -> None:
    facts = load_tokenizer(str(folder)).facts
    tokenizer = Tokenizer(byte_level(), facts, max_waiting=0)
    with pytest.raises(Overloaded, match="0 long prompts wait"):
        await tokenizer.encode("x" * 9000, add_special_tokens=False, max_tokens=9000)


async def test_the_files_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    hf_tokenizer = byte_level()
    hf_tokenizer.enable_truncation(3)
    hf_tokenizer.enable_padding(length=50)
    hf_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(await tokenizer.encode("hello", add_special_tokens=False, max_tokens=50)) == 5


async def test_ids_without_text_have_none() -> None:
    tokenizer = Tokenizer(byte_level(), FACTS)
    (letter,) = await tokenizer.encode("a", add_special_tokens=False, max_tokens=1)
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
    assert await words.encode_word_variants(["do", " do", "x", "dx"]) == (
        ((3,), (4,)),
        ((3,), (4,)),
        ((5,),),
        ((1, 5),),
    )
    assert await words.encode_word_variants([" "]) == (((0,),),)
    many = await words.encode_word_variants(["do"] * 1000)
    assert many == (((3,), (4,)),) * 1000


async def test_a_word_of_nothing_that_the_tokenizer_knows_has_no_tokens() -> None:
    words = Tokenizer(HfTokenizer(models.BPE({"a": 0}, [])), FACTS)
    assert await words.encode_word_variants(["?"]) == (((),),)


def test_a_chat_template_of_another_file(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("own")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages }}")
    assert load_tokenizer(str(tmp_path)).facts.chat_template == "own"
    made = load_tokenizer(str(tmp_path), chat_template=str(other))
    assert made.facts.chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"chat_template.*name a file"):
        load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "absent"))
