"""--rope-scaling and --hf-overrides change what config.json says, and the meaning of KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UnsupportedModel
from engine.checkpoint import main
from engine.families.config import ModelConfig
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.families.read import choose_implementation, read_config

MakeModel = Callable[..., Path]

YARN = '{"rope_type": "yarn", "factor": 4}'
DYNAMIC_YARN = '{"rope_type": "dynamic_yarn", "factor": 4}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, **changes: Any) -> Path:
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def read(folder: Path, hf_overrides: str | None = None, rope: str | None = None) -> ModelConfig:
    return read_config(folder, ConfigOverrides.parse(hf_overrides, rope))


def test_a_model_is_stretched_and_keeps_its_theta(folder: Path) -> None:
    for changed in (read(folder, rope=YARN), read(folder, f'{{"rope_parameters": {YARN}}}')):
        assert (changed.rope.rope_type, changed.rope.factor) == ("yarn", 4)
        assert changed.rope.theta == 5e5
        assert changed.rope.original_length == 128
        assert (changed.max_position_embeddings, changed.derived_max_len) == (128, 512)


def test_options_read_as_the_same_config_file_does(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write(
        tmp_path / "other",
        max_position_embeddings=256,
        rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 1e6},
    )
    overrides = '{"max_position_embeddings": 256, "rope_theta": 1000000.0}'
    changed = read(write(tmp_path), overrides, '{"type": "linear", "factor": 2}')
    assert changed.derived_max_len == read_config(other).derived_max_len == 512
    assert changed.rope.theta == read_config(other).rope.theta


def test_each_stretch_has_kv_of_its_own(folder: Path) -> None:
    given = [
        (None, None),
        (None, YARN),
        (None, YARN.replace("4", "2")),
        (None, DYNAMIC_YARN),
        ('{"rope_theta": 7.0}', YARN),
        ('{"max_position_embeddings": 256}', YARN),
        ('{"rms_norm_eps": 0.5}', None),
    ]
    assert len({read(folder, *options).kv_digest for options in given}) == len(given)


def test_null_takes_a_stretch_away(tmp_path: Path) -> None:
    plain = read_config(write(tmp_path))
    stretched = write(
        tmp_path, rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5}
    )
    assert read(stretched, '{"rope_parameters": null}').kv_digest == plain.kv_digest
    assert read_config(stretched, NO_OVERRIDES).rope.rope_type == "linear"


@pytest.mark.parametrize(
    ("hf_overrides", "rope", "words"),
    [
        (None, "{}", ["rope_type=None", "dynamic_yarn"]),
        (None, '{"rope_type": "yarnn"}', ["rope_type='yarnn'", "yarn, "]),
        (None, '{"rope_type": "yarn"}', ["factor"]),
        (None, '{"rope_type": "yarn", "factor": 0}', ["factor=0", "positive"]),
        (None, '{"rope_type": "yarn", "factor": "4"}', ["factor='4'", "number"]),
        (None, '{"rope_type": "yarn", "factor": 4, "facter": 2}', ["facter=2", "factor"]),
        (f'{{"rope_scaling": {YARN}}}', YARN, ["rope_scaling", "twice"]),
        ('{"rope_scaling": 3}', None, ["rope_scaling=3", "object"]),
        ('{"max_positon": 3}', None, ["max_positon=3", "no such field"]),
        ('{"max_position_embeddings": "many"}', None, ["max_position_embeddings='many'"]),
        ('{"max_position_embeddings": 0}', None, ["max_position_embeddings=0", "positive"]),
    ],
)
def test_a_wrong_change_is_refused_by_option_field_and_value(
    folder: Path, hf_overrides: str | None, rope: str | None, words: list[str]
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(folder, hf_overrides, rope)
    option = "--rope-scaling=" if rope and not hf_overrides else "--hf-overrides="
    for word in (option, *words):
        assert word in caught.value.message


def test_serve_checks_the_changed_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").touch()
    for value, status in ((YARN, 0), ('{"rope_type": "x"}', 1)):
        monkeypatch.setattr("sys.argv", ["checkpoint", "--rope-scaling", value, "--", str(folder)])
        assert main() == status
    assert "rope_type='x'" in json.loads(capsys.readouterr().out)["message"]


def test_a_stretch_that_is_not_baton_s_goes_to_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, model_type="glm4_moe", partial_rotary_factor=0.5, head_dim=16)
    changed = ConfigOverrides.parse(None, YARN)
    assert choose_implementation(folder, "auto").name == "baton"
    assert choose_implementation(folder, "auto", changed).name == "transformers"


@pytest.mark.slow
def test_transformers_code_reads_the_changed_config(tiny_model: MakeModel) -> None:
    from engine.transformers.describe import describe, read_transformers_config

    folder = tiny_model("llama")
    longer = ConfigOverrides.parse('{"max_position_embeddings": 4096}', YARN)
    config = read_transformers_config(folder, longer)
    assert config.rope_parameters["rope_type"] == "yarn"
    before, after = describe(folder), describe(folder, longer)
    assert after.max_len == 4096
    assert before.kv_digest != after.kv_digest
    for hf_overrides, rope, word in (
        ('{"max_positon": 3}', None, "max_positon=3"),
        ('{"hidden_size": "wide"}', None, "hidden_size"),
        (None, DYNAMIC_YARN, "rope_type='dynamic_yarn'"),
    ):
        with pytest.raises(UnsupportedModel, match=word):
            describe(folder, ConfigOverrides.parse(hf_overrides, rope))
