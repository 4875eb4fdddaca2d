"""Perplexity by length of models that read beyond their training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.machine import BUNDLED_MODEL
from bench.train_short import Curve, Lengths, curve, draw, load, stretches, tables_of
from distill.training import make_optimizers
from engine.families.overrides import ConfigOverrides
from engine.families.read import parse_config
from tests.support.tiny_models import make_tiny_model

LENGTHS = Lengths(32, (16, 48, 80), 8)


@pytest.mark.parametrize("name", sorted(stretches()))
def test_each_stretch_lets_the_bundled_model_read_four_times_its_length(name: str) -> None:
    given = stretches()[name]
    parsed = ConfigOverrides.parse(json.dumps(given.fields), json.dumps(given.rope_scaling))
    raw = json.loads((Path(BUNDLED_MODEL) / "config.json").read_text())
    config = parse_config(parsed.applied(raw, frozenset()))
    assert config.longest_len == 4 * raw["max_position_embeddings"]


def test_layers_of_a_bloom_model_are_trained_as_layers() -> None:
    model = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"h": torch.nn.Linear(2, 2)})})
    matrices, others = make_optimizers(model)
    assert [p.ndim for p in matrices.param_groups[0]["params"]] == [2]
    assert [p.ndim for p in others.param_groups[0]["params"]] == [1]


@pytest.mark.slow
def test_the_last_tokens_are_scored_as_transformers_does(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    text = [(i * i + 3 * i) % 90 for i in range(80)]
    found = curve("", load(str(model), LENGTHS), [text], LENGTHS).perplexity
    twin = AutoModelForCausalLM.from_pretrained(model)
    for length, perplexity in found.items():
        ids = torch.tensor([text[-length:]])
        with torch.inference_mode():
            logits = twin(input_ids=ids).logits[0, -1 - LENGTHS.num_scored : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, -LENGTHS.num_scored :])
        assert perplexity == pytest.approx(float(loss.exp()), rel=1e-3)


@pytest.mark.slow
def test_a_dynamic_stretch_changes_only_prompts_beyond_the_training(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", "llama", max_position_embeddings=128))
    texts = [[(7 * i + j) % 90 for i in range(80)] for j in range(2)]
    plain = curve("", load(model, LENGTHS), texts, LENGTHS).perplexity
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    dynamic = load(model, LENGTHS, ConfigOverrides({"max_position_embeddings": 32}, scaling))
    stretched = curve("", dynamic, texts, LENGTHS).perplexity
    assert stretched[16] == pytest.approx(plain[16], rel=1e-4)
    assert stretched[80] != pytest.approx(plain[80], rel=1e-4)


def test_tables_and_picture_have_all_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [
        Curve("YaRN", 2048, {1024: 9.0, 4096: 12.5}),
        Curve("ALiBi", 128, {64: 30.0, 512: 31.0}),
    ]
    assert "| YaRN | 9.00 | 12.5 |" in tables_of(found)
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
