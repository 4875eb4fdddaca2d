"""A draft model with other meanings of token ids is refused at start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.config import DecodeOptions
from baton.config.load import build_options
from baton.errors import ConfigError
from engine.oracle import OracleEngine, OracleLayers, OracleOptions
from worker_core.speculation.draft_model import check_specs, check_tokenizers
from worker_core.speculation.speculator import Speculator, build_speculation


def test_another_size_of_vocabulary_is_refused() -> None:
    target = OracleEngine(OracleOptions(num_blocks=4, vocab_size=10)).spec
    draft = OracleEngine(OracleOptions(num_blocks=4, vocab_size=11)).spec
    check_specs(target, target)
    with pytest.raises(ConfigError, match="speculative_model=oracle: its vocabulary has 11"):
        check_specs(target, draft)


def test_a_draft_model_with_states_is_refused() -> None:
    target = OracleEngine(OracleOptions(num_blocks=4)).spec
    draft = OracleEngine(OracleOptions(num_blocks=4, layers=OracleLayers(has_states=True))).spec
    with pytest.raises(ConfigError, match=r"speculative_model=oracle: .* which cannot go back"):
        check_specs(target, draft)


def tokenizer(folder: Path, vocab: Mapping[str, int], **added: int) -> Path:
    folder.mkdir()
    content = {
        "added_tokens": [{"content": token, "id": index} for token, index in added.items()],
        "model": {"type": "BPE", "vocab": vocab},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_tokenizers_with_other_ids_are_refused(tmp_path: Path) -> None:
    target = tokenizer(tmp_path / "t", {"a": 0, "b": 1}, end=2)
    check_tokenizers(target, tokenizer(tmp_path / "same", {"b": 1, "a": 0}, end=2))
    for name, vocab, end in (("swapped", {"a": 1, "b": 0}, 2), ("added", {"a": 0, "b": 1}, 3)):
        with pytest.raises(ConfigError, match="its tokenizer differs"):
            check_tokenizers(target, tokenizer(tmp_path / name, vocab, end=end))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"speculative_method": "draft"}, "--speculative-model"),
        ({"speculative_method": "ngram", "speculative_model": "x"}, "--speculative-model"),
        ({"num_speculative_tokens": 0}, "--num-speculative-tokens"),
        ({"speculative_method": "eagle"}, "--speculative-model"),
        ({"speculative_method": "medusa"}, "--speculative-model"),
        ({"speculative_method": "mtp", "speculative_model": "x"}, "--speculative-model"),
        ({"speculative_method": "mtp", "async_scheduling": True}, "--async-scheduling"),
        ({"speculative_method": "magic"}, "--speculative-method"),
    ],
)
def test_options_that_do_not_fit_are_refused(values: Mapping[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_options(DecodeOptions, {"model": "m", **values})


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"speculative_method": "none"}, type(None)),
        ({"speculative_method": "ngram"}, Speculator),
        ({"speculative_method": "draft", "speculative_model": "other"}, Speculator),
    ],
)
def test_options_make_speculation(values: Mapping[str, object], kind: type[object]) -> None:
    options = DecodeOptions.model_validate({"model": "m", "engine": "oracle", **values})
    engine = OracleEngine(OracleOptions(num_blocks=8))
    assert isinstance(build_speculation(options, engine, lambda: 0.0), kind)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_needs_a_model(method: str) -> None:
    options = DecodeOptions.model_validate(
        {"model": "m", "engine": "oracle", "speculative_method": method, "speculative_model": "h"}
    )
    with pytest.raises(ConfigError, match="an oracle engine has no hidden states"):
        build_speculation(options, OracleEngine(OracleOptions(num_blocks=8)), lambda: 0.0)
