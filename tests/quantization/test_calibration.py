"""`baton quantize --calibration`: what a text tells of inputs, and that rounding by it loses
less."""

from __future__ import annotations

import argparse
import heapq
import inspect
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from baton.cli.main import app
from baton.errors import ConfigError
from baton.types import Sampling
from engine.families.read import read_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.quantization.calibration import grams, read_pieces
from engine.quantization.quantize import quantize_checkpoint
from engine.quantization.rounding import round_by_inputs, round_to_integers
from engine.quantization.scheme import Scheme
from engine.quantization.sparsity import prune, prune_by_inputs
from tests.support.engines import load_engine
from tests.support.tiny_models import Family, make_tiny_model

BOX_MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"
PIECES = [list(range(7, 60)), [9], [200, 3, 3, 41] * 5]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("family", "window"), [("llama", None), ("mistral", 7), ("qwen3", None), ("deepseek_v3", None)]
)
def test_grams_are_those_of_transformers(
    family: Family, window: int | None, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(
        tmp_path / "model", family, sliding_window=window, first_k_dense_replace=2
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, layer in model.named_modules():
        # The heads of a latent's keys and values run apart, and are not rounded.
        if isinstance(layer, torch.nn.Linear) and not name.endswith(("lm_head", "kv_b_proj")):
            rows = seen.setdefault(name, [])
            layer.register_forward_pre_hook(lambda _, x, rows=rows: rows.append(x[0].flatten(0, 1)))
    with torch.inference_mode():
        for ids in PIECES:
            model(torch.tensor([ids]))
    by_layer = list(grams(path, read_config(path), PIECES))
    assert len(by_layer) == 2
    found = by_layer[0] | by_layer[1]
    assert found.keys() == seen.keys()
    for name, rows in seen.items():
        inputs = torch.cat(rows)
        wanted = inputs.t() @ inputs
        assert (found[name] - wanted).norm() < 1e-4 * wanted.norm()


def related_inputs(num_in: int, generator: torch.Generator) -> torch.Tensor:
    """[tokens, num_in] of unlike sizes, each a mixture of fewer."""
    mixed = torch.randn(1000, num_in // 4, generator=generator)
    spread = torch.randn(num_in // 4, num_in, generator=generator)
    return (mixed @ spread) * torch.randn(num_in, generator=generator).exp()


def test_outputs_change_less_for_such_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(40, 96, generator=generator), related_inputs(96, generator)
    plain = round_to_integers(weight, 4, 32)
    fitted = round_by_inputs(weight, 4, 32, inputs.t() @ inputs)
    assert fitted.scales.shape == plain.scales.shape
    changes = [(inputs @ (x.dequantize() - weight).t()).norm() for x in (fitted, plain)]
    assert changes[0] < 0.5 * changes[1]
    # At the price of the weights.
    assert (fitted.dequantize() - weight).norm() > (plain.dequantize() - weight).norm()


def test_inputs_that_say_nothing_leave_rounding_to_the_nearest() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    plain = round_to_integers(weight, 4, 32).dequantize()
    alone = round_by_inputs(weight, 4, 32, torch.eye(64))
    assert torch.equal(alone.dequantize(), plain)
    # Inputs that are always zero: anything is right, and nothing is infinite.
    assert round_by_inputs(weight, 4, 32, torch.zeros(64, 64)).dequantize().isfinite().all()


def test_pruning_for_such_inputs_changes_outputs_less() -> None:
    generator = torch.Generator().manual_seed(0)
    # Not a multiple of the inputs that are fitted together.
    weight, inputs = torch.randn(40, 96, generator=generator), related_inputs(96, generator)
    fitted = prune_by_inputs(weight, inputs.t() @ inputs)
    assert (fitted.view(40, 24, 4) != 0).sum(-1).eq(2).all()
    changes = [(inputs @ (x - weight).t()).norm() for x in (fitted, prune(weight))]
    assert changes[0] < 0.5 * changes[1]
    assert torch.equal(prune_by_inputs(weight, torch.eye(96)), prune(weight))


def logits_of(path: Path) -> torch.Tensor:
    ids = (
        Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json")).encode(inspect.getsource(heapq)).ids
    )
    ids = ids[:500]
    engine = load_engine(str(path), num_blocks=40, dtype="float32")
    rows = tuple(SampleRow(i, Sampling(), ids[: i + 1], len(ids)) for i in range(len(ids)))
    return engine.logits(Batch((SequenceSlice(ids, 0, range(40), rows, len(ids)),)))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", pytest.param("sparse24", marks=pytest.mark.long)])
def test_the_bundled_model_is_nearer_to_itself_on_other_text(
    scheme: Scheme, tmp_path: Path
) -> None:
    text = tmp_path / "text.py"
    text.write_text(inspect.getsource(argparse)[:16_000])
    quantize_checkpoint(BOX_MODEL, tmp_path / "plain", scheme)
    quantize_checkpoint(BOX_MODEL, tmp_path / "calibrated", scheme, calibration=text)
    wanted = logits_of(BOX_MODEL).log_softmax(-1)

    def divergence(path: Path) -> float:
        """Kullback-Leibler, nats per token."""
        got = logits_of(path).log_softmax(-1)
        return float((wanted.exp() * (wanted - got)).sum(-1).mean())

    assert divergence(tmp_path / "calibrated") < 0.6 * divergence(tmp_path / "plain")


def test_what_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", intermediate_size=96)
    config = read_config(model)
    text = tmp_path / "text"
    with pytest.raises(ConfigError, match="file of text"):
        read_pieces(model, text, config)
    text.write_text("")
    with pytest.raises(ConfigError, match="no text"):
        read_pieces(model, text, config)
    text.write_text("some text")
    assert read_pieces(model, text, config) == [list(b"some text")]
    with pytest.raises(ConfigError, match="eight bits"):
        quantize_checkpoint(model, tmp_path / "new", "int8", calibration=text)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        quantize_checkpoint(model, tmp_path / "new", "int4", calibration=text)
    assert not (tmp_path / "new").exists()


def test_long_texts_are_cut_to_what_the_model_reads(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=40)
    text = tmp_path / "text"
    text.write_text("abc" * 30)
    pieces = read_pieces(model, text, read_config(model))
    assert [len(piece) for piece in pieces] == [40, 40, 10]


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", intermediate_size=96)
    text = tmp_path / "text"
    text.write_text("some text")
    arguments = ["quantize", str(model), "--scheme", "int4", "--output", str(tmp_path / "new")]
    runner = CliRunner()
    assert runner.invoke(app, [*arguments, "--calibration", str(text)]).exit_code == 0
    quantize_checkpoint(model, tmp_path / "plain", "int4")
    written, plain = (tmp_path / name / "model.safetensors" for name in ("new", "plain"))
    assert written.read_bytes() != plain.read_bytes()
