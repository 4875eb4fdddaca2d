"""What cannot be served by transformers' code is refused by name, before memory is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError, MissingTensor, UnsupportedModel
from baton.model.checkpoint import check_checkpoint
from baton.model.config import choose_implementation
from baton.model.transformers_backend.describe import describe
from tests.support.architectures import REFUSED, make_checkpoint, write_config
from tests.transformers_backend.conftest import load


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_its_name_and_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name][1]) as refused:
        describe(write_config(tmp_path, name))
    assert repr(name) in str(refused.value)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModel, match="never run"):
        describe(tmp_path)


def test_quantised_weights_are_refused_before_transformers_is_imported(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        choose_implementation(tmp_path, "transformers")


def test_ranks_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        load(path, tensor_parallel_size=2)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2")
    weights = load_file(path / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=r"h\.1\.mlp\.c_fc\.weight"):
        load(path)


def test_auto_takes_our_own_where_there_is_one(tmp_path: Path) -> None:
    for kind, expected in (("llama", "baton"), ("gpt2", "transformers")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert choose_implementation(tmp_path, "auto") == expected
        assert choose_implementation(tmp_path, "transformers") == "transformers"
        assert choose_implementation(tmp_path, "baton") == "baton"


def test_a_checkpoint_is_looked_at_without_transformers(tmp_path: Path) -> None:
    """Before any worker starts, in a process that has not even torch."""
    path = make_checkpoint(tmp_path, "gpt2")
    code = (
        "import sys\n"
        "from baton.model.checkpoint import check_checkpoint\n"
        f"check_checkpoint({str(path)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert check_checkpoint(str(path), None, "auto") == path
