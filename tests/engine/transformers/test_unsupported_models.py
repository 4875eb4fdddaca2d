"""What cannot be served by transformers' code is refused by name, before memory is taken."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton.errors import (
    ConfigError,
    MissingTensor,
    TensorMismatch,
    UnsupportedModel,
    UnsupportedSetting,
)
from baton.types import Sampling
from engine.checkpoint import check_checkpoint
from engine.choose_source import model_source
from engine.families.read import choose_implementation
from tests.engine.transformers.conftest import NUM_TOKENS, load, prompts
from tests.support.architectures import REFUSED, make_checkpoint, write_config
from tests.support.drive_engine import generate, token_ids
from tests.support.quantized_models import FORMATS, quantize
from tests.support.transformers_greedy import greedy_outputs


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_its_name_and_the_reason(name: str, tmp_path: Path) -> None:
    from engine.transformers.describe import describe

    with pytest.raises(UnsupportedModel, match=REFUSED[name][1]) as refused:
        describe(write_config(tmp_path, name))
    assert repr(name) in str(refused.value)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    from engine.transformers.describe import describe

    config = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModel, match="never run"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("kind", "method", "fix"),
    [
        ("bitnet", "bitnet", "use the unquantised"),
        ("mixtral", "hqq", "use the unquantised"),
        ("gpt_oss", "mxfp4", "leave out --model-impl"),
    ],
)
def test_formats_that_are_not_read_are_refused_before_transformers_is_imported(
    kind: str, method: str, fix: str, tmp_path: Path
) -> None:
    config = {"model_type": kind, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reason = rf"{kind}'.*quant_method={method}: .*gptq, awq, fp8 or gguf is read.*{fix}"
    with pytest.raises(UnsupportedModel, match=reason):
        choose_implementation(tmp_path, "transformers")


def test_formats_of_weights_that_are_turned_are_refused_but_gptq(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "dense", "gpt2")
    rounded = quantize(path, tmp_path / "fp8", *FORMATS["fp8"], lambda *_: False)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel .*quant_method=fp8.*gptq is read"):
        load(rounded)


@pytest.fixture
def rounded(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "dense", "gptj")
    return quantize(path, tmp_path / "fp8", *FORMATS["fp8"], lambda name, _: "fc_in.w" in name)


def test_a_quantised_layer_that_lacks_a_tensor_is_refused(rounded: Path) -> None:
    weights = load_file(rounded / "model.safetensors")
    scale = weights.pop("transformer.h.1.mlp.fc_in.weight_scale_inv")
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"h\.1\.mlp\.fc_in\.weight' is of .*float8"):
        load(rounded)
    del weights["transformer.h.1.mlp.fc_in.weight"]
    weights["transformer.h.1.mlp.fc_in.weight_scale_inv"] = scale
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=r"h\.1\.mlp\.fc_in': weight"):
        load(rounded)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 3}, "this model takes 1, 2, 4"),
        ({"pipeline_parallel_size": 3}, "the model has 2 layers with KV"),
        ({"context_parallel_size": 2}, "GPT2LMHeadModel"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "GPT2LMHeadModel"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match=reason):
        load(path, **options)


def test_stages_that_would_read_the_kv_of_others_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma4_text")
    with pytest.raises(ConfigError, match="read the KV of earlier ones"):
        load(path, pipeline_parallel_size=2)


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
        assert choose_implementation(tmp_path, "auto").name == expected
        assert choose_implementation(tmp_path, "transformers").name == "transformers"
        assert choose_implementation(tmp_path, "baton").name == "baton"


#: That our own layers do not know.
OTHER = {"hidden_act": "gelu"}


def test_a_setting_that_our_own_layers_do_not_know_goes_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "phi3", **OTHER)
    with caplog.at_level(logging.WARNING):
        load(path, model_impl="auto")
    own = [record for record in caplog.records if record.name == model_source.__module__]
    (line,) = (record.getMessage() for record in own)
    assert "transformers' code runs the layers" in line
    assert "hidden_act='gelu'" in line
    with pytest.raises(UnsupportedSetting, match="gelu"):
        load(path, model_impl="baton")


def test_so_does_a_quantised_one(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "phi3", **OTHER)
    path = quantize(dense, tmp_path / "awq", *FORMATS["awq"])
    outputs = generate(load(path, model_impl="auto"), prompts(), Sampling(), NUM_TOKENS)
    assert token_ids(outputs) == greedy_outputs(dense, prompts(), NUM_TOKENS)


def test_what_neither_runs_is_refused_with_both_reasons(tmp_path: Path) -> None:
    """Each of the two has something against it."""
    raw = {"model_type": "llama", "hidden_act": "relu", "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=r"hidden_act='relu'.*By transformers: .*encoder"):
        model_source(tmp_path, "auto")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "gelu.*quant_method=hqq"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"architectures": ["Phi3ForSequenceClassification"]}, "Baton generates text"),
    ],
)
def test_what_is_wrong_or_cannot_be_read_does_not_go_to_transformers(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    raw = {"model_type": "phi3", **OTHER, **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=reason):
        choose_implementation(tmp_path, "auto")


@pytest.mark.slow
def test_a_checkpoint_is_looked_at_without_transformers(tmp_path: Path) -> None:
    """Before any worker starts, in a process that has not even torch."""
    path = make_checkpoint(tmp_path, "gpt2")
    code = (
        "import sys\n"
        "from engine.checkpoint import check_checkpoint\n"
        f"check_checkpoint({str(path)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert check_checkpoint(str(path), None, "auto") == path
