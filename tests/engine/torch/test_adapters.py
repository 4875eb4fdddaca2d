"""Adapters in an engine: greedy tokens are those of transformers on merged weights, in float32,
whatever the chunks, a handoff or drafts; several in one batch, and none of them changes another
sequence by a bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import EngineFault
from baton.types import Sampling
from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.range import KvRange
from engine.torch.engine import TorchEngine
from tests.support.adapters import ATTENTION, MLP, make_adapter, merged
from tests.support.engines import load_engine
from tests.support.tiny_models import Family, make_tiny_model

NUM_TOKENS = 8
GREEDY = Sampling()
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
BOTH = ("gate_up_proj", "down_proj")
#: One call otherwise; windows and norms after; packed weights and reordered heads; both ends of a
#: model; experts by themselves and as parameters; latent attention, and with shared experts.
SHAPES: dict[str, tuple[Family, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "gemma2": ("gemma2", {"sliding_window": 11}, {"rank": 3, "use_rslora": True}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
            }
        },
        {"targets": ("qkv_proj", "gate_up_proj", "down_proj")},
    ),
    "experts": ("qwen3_moe", {"mlp_only_layers": [0]}, {"rank": 3}),
    "some experts": ("qwen3_moe", {}, {"targets": ("experts.2.up_proj", "experts.5.down_proj")}),
    "stacked experts": ("qwen3_moe", {}, {"targets": ATTENTION, "stacks": BOTH}),
    "one stack": ("qwen3_moe", {}, {"targets": (), "stacks": ("down_proj",)}),
    "stacks of alternating rows": (
        "gpt_oss",
        {"sliding_window": 7},
        {"targets": ATTENTION, "stacks": BOTH},
    ),
    "llama": ("llama", {}, {"targets": ("v_proj", "down_proj"), "rank": 16}),
    "output": (
        "gemma2",
        {"sliding_window": 11, "tie_word_embeddings": False, "final_logit_softcapping": 2.0},
        {"targets": ("embed_tokens", "lm_head", "up_proj")},
    ),
    "latent": ("deepseek_v2", {}, {"targets": LATENT}),
    "latent without query_down": (
        "deepseek_v2",
        {"q_lora_rank": None},
        {"targets": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")},
    ),
    "latent and shared experts": ("deepseek_v3", {}, {"targets": ("kv_b_proj", *MLP)}),
}
FEW = ("phi3", "output", "experts")


@dataclass(frozen=True, slots=True)
class Case:
    """expected: by adapter's name, "" for none, greedy tokens for each of `prompts`."""

    model: Path
    modules: dict[str, str]
    expected: dict[str, list[list[int]]]

    def engine(self, **options: Any) -> TorchEngine:
        return load_engine(
            str(self.model),
            num_blocks=64,
            lora_modules=self.modules,
            **{"block_size": 8, **options},
        )


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            family, overrides, of_adapter = SHAPES[name]
            model = make_tiny_model(folder / "model", family, **overrides)
            modules, expected = {}, {"": greedy_of(model)}
            for seed, adapter in enumerate(("red", "blue"), start=1):
                path = make_adapter(folder / adapter, model, seed=seed, **of_adapter)
                modules[adapter] = str(path)
                expected[adapter] = greedy_of(merged(folder / f"{adapter}-merged", model, path))
            made[name] = Case(model, modules, expected)
        return made[name]

    return make


@pytest.fixture(
    params=[name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    return case_of(request.param)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (9, 30)]


def greedy_of(path: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(path, dtype=torch.float32)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            eos_token_id=None,
            **options,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def part(
    tokens: Sequence[int], start: int, end: int, table: Sequence[int], adapter: str
) -> SequenceSlice:
    rows = (SampleRow(end - start - 1, GREEDY, tokens[:end], len(tokens)),)
    return SequenceSlice(tokens[start:end], start, table, rows, len(tokens), adapter=adapter)


def serve(
    engine: TorchEngine, adapters: Sequence[str], chunk_tokens: int = 1 << 20
) -> dict[str, list[list[int]]]:
    """Both prompts with each adapter, all in one batch a step; prompts go in by chunks."""
    jobs = [(adapter, list(prompt)) for adapter in adapters for prompt in prompts()]
    tables = [range(6 * place, 6 * place + 6) for place in range(len(jobs))]
    computed = [0] * len(jobs)
    lengths = [len(tokens) for _, tokens in jobs]
    while running := [i for i, job in enumerate(jobs) if len(job[1]) < lengths[i] + NUM_TOKENS]:
        parts = []
        for i in running:
            adapter, tokens = jobs[i]
            start, computed[i] = computed[i], min(len(tokens), computed[i] + chunk_tokens)
            own = part(tokens, start, computed[i], tables[i], adapter)
            # A prompt's chunks but for the last give no token.
            parts.append(own if computed[i] == len(tokens) else own._replace(rows=()))
        for i, samples in zip(running, engine.forward(Batch(tuple(parts))), strict=True):
            jobs[i][1].extend(sample.token_id for sample in samples)
    outputs: dict[str, list[list[int]]] = {}
    for (adapter, tokens), length in zip(jobs, lengths, strict=True):
        outputs.setdefault(adapter, []).append(tokens[length:])
    return outputs


def test_greedy_tokens_are_those_of_merged_weights(case: Case) -> None:
    """With two adapters and none in each batch, by whole prompts and by chunks."""
    engine = case.engine()
    assert serve(engine, ("red", "", "blue")) == case.expected
    assert serve(engine, ("blue", "red", ""), chunk_tokens=7) == case.expected
    everything = [tuple(map(tuple, outputs)) for outputs in case.expected.values()]
    assert len(set(everything)) == 3


def test_a_handoff_changes_nothing(case: Case) -> None:
    """One engine computes a prompt, another, with other blocks, goes on from its KV alone."""
    sender, receiver = case.engine(), case.engine(block_size=5)
    assert receiver.spec.layout.difference(sender.spec.layout) is None
    prompt, wanted = prompts()[1], case.expected["red"][1]
    sender.forward(Batch((part(prompt, 0, len(prompt), range(8), "red"),)))
    piece = KvRange(0, len(prompt), 0, sender.spec.layout.num_layers)
    moved = bytearray(piece.num_bytes(sender.spec.layout.token_layer_bytes))
    sender.kv.pack(range(8), piece, memoryview(moved))
    receiver.kv.unpack(range(10, 20), piece, memoryview(moved))
    tokens = [*prompt, wanted[0]]
    while len(tokens) < len(prompt) + NUM_TOKENS:
        at = len(tokens) - 1
        step = Batch((part(tokens, at, at + 1, range(10, 20), "red"),))
        tokens.append(receiver.forward(step)[0][0].token_id)
    assert tokens[len(prompt) :] == wanted


@pytest.mark.slow
def test_drafts_change_nothing(case: Case) -> None:
    """A right one, a wrong one and one behind it are verified beside the last token."""
    engine = case.engine()
    prompt, wanted = prompts()[1], case.expected["blue"][1]
    engine.forward(Batch((part(prompt, 0, len(prompt), range(8), "blue"),)))
    tokens = [*prompt, wanted[0], wanted[1], (wanted[2] + 1) % 256, 7]
    start = len(prompt)
    rows = tuple(SampleRow(i, GREEDY, tokens[: start + i + 1], start) for i in range(4))
    verified = SequenceSlice(tokens[start:], start, range(8), rows, start, adapter="blue")
    samples = engine.forward(Batch((verified,)))[0]
    assert [sample.token_id for sample in samples[:2]] == wanted[1:3]


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_to_the_bit_in_any_batch(case: Case, dtype: str) -> None:
    """With and without an adapter; alone, and beside the others by chunks."""
    engine, tokens = case.engine(dtype=dtype), prompts()[1]
    for adapter in ("", "red"):
        whole = engine.logits(Batch((part(tokens, 0, 30, range(8), adapter),)))
        engine.logits(
            Batch(
                (
                    part(tokens[::-1], 0, 30, range(10, 18), "blue"),
                    part(tokens, 0, 11, range(20, 28), adapter),
                    part(tokens[3:], 0, 20, range(30, 38), "red"),
                )
            )
        )
        last = part(tokens, 11, 30, range(20, 28), adapter)
        others = (part(tokens, 0, 9, range(30, 38), name) for name in ("", "blue"))
        mixed = engine.logits(Batch((next(others), last, next(others))))
        assert torch.equal(mixed[1:2], whole)


@pytest.mark.slow
def test_a_worker_without_adapters_is_what_it_was(case_of: Callable[[str], Case]) -> None:
    """Its fingerprint names none; with adapters, or others by the same name, it is another."""
    case = case_of("qwen2")
    plain = load_engine(str(case.model), num_blocks=8)
    assert plain.spec.adapters == ()
    assert plain.spec.layout.fingerprint.count(":") == 1
    swapped = {"red": case.modules["blue"], "blue": case.modules["red"]}
    layouts = {
        load_engine(str(case.model), num_blocks=8, lora_modules=modules).spec.layout.fingerprint
        for modules in ({}, {"red": case.modules["red"]}, case.modules, swapped)
    }
    assert len(layouts) == 4
    assert plain.spec.layout.fingerprint in layouts


@pytest.mark.slow
def test_an_adapter_that_is_not_there_fails_its_slice_alone(case_of: Callable[[str], Case]) -> None:
    engine, prompt = case_of("qwen2").engine(), prompts()[0]
    with pytest.raises(EngineFault, match="adapter 'green' is not loaded") as caught:
        engine.forward(
            Batch(
                (
                    part(prompt, 0, 9, range(2), ""),
                    part(prompt, 0, 9, range(2, 4), "green"),
                )
            )
        )
    assert caught.value.metadata["slices"] == "1"
