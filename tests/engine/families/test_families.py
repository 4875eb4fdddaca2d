"""Every family's greedy tokens are those of transformers' generate, in float32: by whole prompts,
by chunks, after a handoff, with drafts, quantised, and on two ranks; and a sequence's logits are
the same to the bit in any batch. `python -m bench.models` makes a table of what passes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError, TensorMismatch, UnsupportedModel
from baton.types import Sampling
from baton_kernels.cpu.library import library
from baton_kernels.linear import PlainLinear
from bench.quantized_checkpoints import Scheme, encode, quantize_checkpoint
from engine import choose_source, native_source
from engine.families.read import parse_config
from engine.families.registry import FAMILIES
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.range import KvRange
from engine.quantization.weight import StoredWeight
from engine.ranks.mesh import Degrees
from engine.ranks.team import RankTeam
from engine.torch import load
from engine.torch import packed as packing
from engine.torch.decoder import Decoder
from engine.torch.engine import TorchEngine
from engine.torch.native_decoder import NativeDecoder, make_decoder
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.quantized_models import FORMATS, quantize
from tests.support.rank_threads import start_thread
from tests.support.transformers_greedy import greedy_outputs

MakeModel = Callable[..., Path]

NUM_TOKENS = 10
PROMPT_LENGTHS = (1, 7, 45, 16, 70)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1000.0}

#: As DeepSeek stretches it.
LONG_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

#: Rope settings of a Phi-3 for longer contexts than it was first trained on.
FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.9],
    "long_factor": [1.2, 1.9, 3.1, 5.3, 8.9, 14.0],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-moe-plain": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "glm4-moe": (
        "glm4_moe",
        {
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_hidden_layers": 3,
        },
    ),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 11,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-uncapped": (
        "gemma2",
        {
            "sliding_window": 20,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 11,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gpt-oss": ("gpt_oss", {"sliding_window": 11, "num_hidden_layers": 3}),
    "phi3": ("phi3", {"sliding_window": 20}),
    "phi3-partial": ("phi3", {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.75}}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": FACTORS,
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 512,
        },
    ),
    "olmo2": ("olmo2", {}),
    "deepseek-v2": ("deepseek_v2", {"num_hidden_layers": 3, "routed_scaling_factor": 1.5}),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": LONG_ROPE},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {"num_hidden_layers": 3, "attention_bias": True, "rope_parameters": LONG_ROPE},
    ),
    "deepseek-v3-halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
}
#: Ranks cannot share a norm of all heads.
SHARED = sorted(set(CASES) - {"olmo2"})


#: One family each with a mixture, norms and windows, packed weights, and latents. `make test`
#: compares tokens of the others with the slow tests; .ci/run does the rest.
FEW = ("glm4-moe", "gemma3", "phi3-partial", "deepseek-v3")


def params_of(names: Iterable[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Parameters for parametrize; names outside of FEW are marked slow, and with `marks`."""
    slow = (pytest.mark.slow, *marks)
    return [name if name in FEW else pytest.param(name, marks=slow) for name in names]


#: For what make test tries with the few alone.
mostly_long = pytest.mark.parametrize("case", params_of(CASES, pytest.mark.long), indirect=True)


@pytest.fixture(params=params_of(CASES))
def case(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Path:
    family, overrides = CASES[request.param]
    return tiny_model(family, **overrides)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@cache
def expected(path: Path) -> list[list[int]]:
    return greedy_outputs(path, prompts(), NUM_TOKENS)


def engine_of(path: Path, block_size: int = 8, **options: Any) -> TorchEngine:
    return load_engine(str(path), block_size=block_size, num_blocks=110, **options)


def rows_of(tokens: Sequence[int], start: int, end: int) -> tuple[SampleRow, ...]:
    return tuple(
        SampleRow(i - start, Sampling(), tokens[: i + 1], len(tokens)) for i in range(start, end)
    )


def part_of(
    tokens: Sequence[int], start: int, end: int, table: Sequence[int], *, is_sampled: bool = True
) -> SequenceSlice:
    rows = rows_of(tokens, start, end) if is_sampled else ()
    return SequenceSlice(tokens[start:end], start, table, rows, len(tokens))


def greedy(engine: TorchEngine, chunk_tokens: int = 1 << 20) -> list[list[int]]:
    return token_ids(generate(engine, prompts(), Sampling(), NUM_TOKENS, chunk_tokens=chunk_tokens))


@pytest.mark.few_cases(2)
def test_greedy_tokens_are_those_of_generate(
    case: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    made: list[Decoder] = []

    def make(*args: Any) -> Decoder:
        made.append(make_decoder(*args))
        return made[-1]

    monkeypatch.setattr(native_source, "make_decoder", make)
    assert greedy(engine_of(case, 16)) == expected(case)
    (decoder,) = made
    record_property("kernels", "one call" if isinstance(decoder, NativeDecoder) else "by operation")


@pytest.mark.few_cases(2)
@mostly_long
def test_chunks_change_nothing(case: Path) -> None:
    assert greedy(engine_of(case, 5), chunk_tokens=7) == expected(case)


@pytest.mark.few_cases(2)
@mostly_long
def test_drafts_change_nothing(case: Path) -> None:
    """Drafts, of which each second run ends in a wrong one, are verified in one step beside the
    last token, as decode workers do it; what rejected ones wrote is overwritten."""
    engine, table = engine_of(case), range(20)
    for prompt, wanted in zip(prompts(), expected(case), strict=True):
        output = drawn(engine, part_of(prompt, 0, len(prompt), table))[-1:]
        while len(output) < NUM_TOKENS:
            drafts = wanted[len(output) : len(output) + 3]
            if len(output) % 2 and drafts:
                drafts[-1] = (drafts[-1] + 1) % 256
            known = [*prompt, *output, *drafts]
            verified = drawn(
                engine, part_of(known, len(known) - len(drafts) - 1, len(known), table)
            )
            num_right = next(
                (i for i, draft in enumerate(drafts) if verified[i] != draft), len(drafts)
            )
            output += verified[: num_right + 1]
        assert output[:NUM_TOKENS] == wanted


def drawn(engine: TorchEngine, part: SequenceSlice) -> list[int]:
    return [sample.token_id for sample in engine.forward(Batch((part,)))[0]]


#: Widths that int4's groups divide.
WIDE = {"intermediate_size": 96, "moe_intermediate_size": 64}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", params_of((name for name in CASES if name != "gpt-oss"), pytest.mark.long)
)
def test_quantised_tokens_are_those_of_what_the_levels_mean(
    tiny_model: MakeModel, tmp_path: Path, name: str, scheme: Scheme
) -> None:
    family, overrides = CASES[name]
    source = tiny_model(family, **{**WIDE, **overrides})
    quantize_checkpoint(source, tmp_path / "rounded", scheme)
    dense = shutil.copytree(source, tmp_path / "dense")
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    meant = {
        name: meaning(rounded, name.removesuffix(".weight"))
        for name in load_file(source / "model.safetensors")
    }
    save_file(meant, dense / "model.safetensors", metadata={"format": "pt"})
    assert greedy(engine_of(tmp_path / "rounded")) == expected(dense)


def published(
    tiny_model: MakeModel, name: str, form: str, folder: Path, **changes: Any
) -> tuple[Path, Path]:
    """(a model of CASES in a format that others publish in, the dense one that means the same)."""
    family, overrides = CASES[name]
    source = tiny_model(family, **{**WIDE, **overrides, **changes})
    dense = shutil.copytree(source, folder / "dense")
    return quantize(dense, folder / "published", *FORMATS[form]), dense


def params_of_formats() -> list[Any]:
    """One family of each format always runs: GPTQ of fused tensors, AWQ of a mixture, integers of
    norms on both sides, float8 of a latent. Only attention of gpt-oss is quantised, as by published
    tools, which leave its experts in one tensor."""
    always = set(zip(FORMATS, ("phi3-partial", "glm4-moe", "gemma3", "deepseek-v3"), strict=True))
    slow = (pytest.mark.slow, pytest.mark.long)
    return [
        pytest.param(name, form, marks=() if (form, name) in always else slow)
        for name in CASES
        for form in FORMATS
    ]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "form"), params_of_formats())
def test_published_tokens_are_those_of_what_the_levels_mean(
    tiny_model: MakeModel, tmp_path: Path, name: str, form: str
) -> None:
    rounded, dense = published(tiny_model, name, form, tmp_path)
    assert greedy(engine_of(rounded)) == expected(dense)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "form"), params_of_formats())
def test_so_are_those_of_levels_that_are_kept(
    tiny_model: MakeModel, tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 16 bits on a CPU, and on a GPU; by the twin of their products."""
    packed: list[StoredWeight] = []

    def pack(weight: StoredWeight, bias: torch.Tensor | None, *_: Any) -> PlainLinear:
        packed.append(weight)
        return PlainLinear(weight.dequantize(), bias)

    monkeypatch.setattr(packing, "_pack_quantized", pack)
    monkeypatch.setattr(load, "keeps_as_stored", lambda *_: lambda _: True)
    rounded, dense = published(tiny_model, name, form, tmp_path)
    assert greedy(engine_of(rounded)) == expected(dense)
    assert packed


@pytest.mark.slow
def test_experts_of_gpt_oss_may_be_quantised_one_by_one(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    rounded, dense = published(tiny_model, "gpt-oss", "gptq", tmp_path)
    quantise_experts(rounded, dense)
    assert greedy(engine_of(rounded)) == expected(dense)


def test_experts_of_gpt_oss_in_halves_are_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    rounded, dense = published(tiny_model, "gpt-oss", "gptq", tmp_path)
    quantise_experts(rounded, dense)
    tensors = load_file(rounded / "model.safetensors")
    halved = {name.replace("gate_up_proj", "gate_proj"): x for name, x in tensors.items()}
    save_file(halved, rounded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"experts\.0\.gate_proj.*use the one in mxfp4"):
        engine_of(rounded)


def quantise_experts(rounded: Path, dense: Path) -> None:
    """Quantise a gpt-oss in GPTQ: each expert's layers become two layers of its own."""
    tensors, meant = (load_file(path / "model.safetensors") for path in (rounded, dense))
    for name in [name for name in tensors if ".experts." in name]:
        folder, _, last = name.rpartition(".")
        for expert, part in enumerate(tensors.pop(name)):
            layer = f"{folder}.{expert}.{last.removesuffix('_bias')}"
            if last.endswith("_bias"):
                tensors[f"{layer}.bias"] = part.clone()
                continue
            pieces, weight = FORMATS["gptq"][0](part.t().contiguous())
            tensors |= {f"{layer}.{piece}": x for piece, x in pieces.items()}
            meant[name][expert] = weight.t()
    for path, kept in ((rounded, tensors), (dense, meant)):
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def meaning(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """The weight that a compressed tensor stands for."""
    scale, packed = tensors.get(f"{layer}.weight_scale"), tensors.get(f"{layer}.weight_packed")
    if scale is None:
        return tensors[layer if layer in tensors else f"{layer}.weight"]
    if packed is None:
        return tensors[f"{layer}.weight"].float() * scale.float()
    levels = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], -1).flatten(1) - 8
    groups = levels.view(len(levels), scale.shape[1], -1) * scale.float()[..., None]
    return groups.flatten(1)


@pytest.mark.few_cases(2)
@mostly_long
def test_logits_after_a_handoff_are_the_same(case: Path) -> None:
    """To a worker with blocks of another size, as the KV channel moves it."""
    prompt, source, target = prompts()[2], engine_of(case, 8), engine_of(case, 5)
    most = len(prompt) - 1
    source.logits(Batch((part_of(prompt, 0, most, range(10), is_sampled=False),)))
    layout = source.spec.layout
    piece = KvRange(0, most, 0, layout.num_layers)
    moved = bytearray(piece.num_bytes(layout.token_layer_bytes))
    source.kv.pack(range(10), piece, memoryview(moved))
    target.kv.unpack(range(20, 30), piece, memoryview(moved))
    stayed = source.logits(Batch((part_of(prompt, most, most + 1, range(10)),)))
    there = target.logits(Batch((part_of(prompt, most, most + 1, range(20, 30)),)))
    torch.testing.assert_close(there, stayed, atol=1e-4 if library() is None else 0.0, rtol=0)


@pytest.mark.few_cases(4)
@mostly_long
@pytest.mark.skipif(library() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_to_the_bit_in_any_batch(case: Path, dtype: str) -> None:
    one, other = prompts()[2], prompts()[4]
    tables = (range(20), range(20, 40))
    alone = engine_of(case, dtype=dtype)
    wanted = alone.logits(Batch((part_of(one, 0, len(one), tables[0]),)))
    mixed = engine_of(case, dtype=dtype)
    cuts = [0, 3, 21, 40, 41, 42, len(one)]
    parts = []
    for step, (start, end) in enumerate(pairwise(cuts)):
        beside = part_of(other, step * 11, step * 11 + 11, tables[1])
        both = (beside, part_of(one, start, end, tables[0]))
        parts.append(mixed.logits(Batch(both))[11:])
    assert torch.equal(torch.cat(parts), wanted)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", params_of(SHARED, pytest.mark.long))
def test_ranks_give_the_same_bits(
    tiny_model: MakeModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is a thread here; processes are tests/engine/ranks/test_processes.py's."""
    losses: list[str] = []
    team = partial(RankTeam, start=start_thread, on_loss=losses.append)
    monkeypatch.setattr("engine.ranks.start.RankTeam", team)
    family, overrides = CASES[name]
    path, prompt = tiny_model(family, **overrides), prompts()[2]
    part = part_of(prompt, 0, len(prompt), range(20))
    alone = engine_of(path).logits(Batch((part,)))
    shared = engine_of(path, tensor_parallel_size=2)
    try:
        assert torch.equal(shared.logits(Batch((part,))), alone)
    finally:
        shared.close()
    assert not losses


@pytest.fixture
def latent_model(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    family, overrides = CASES["deepseek-v3"]
    return shutil.copytree(tiny_model(family, **overrides), tmp_path / "changed")


@pytest.mark.slow
def test_a_kimi_is_a_deepseek_by_another_name(latent_model: Path) -> None:
    wanted = expected(latent_model)
    path = latent_model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2"}))
    assert greedy(engine_of(latent_model)) == wanted


def test_latent_attention_runs_on_gpus(latent_model: Path) -> None:
    source, gpu = choose_source.model_source(latent_model, "auto"), torch.device("cuda")
    for num_ranks in (1, 2):
        source.check_ranks(Degrees(num_ranks), gpu)


@pytest.mark.slow
def test_layers_for_other_uses_are_not_read(latent_model: Path) -> None:
    """DeepSeek's checkpoints have one that predicts a further token, behind the last."""
    wanted, path = expected(latent_model), latent_model / "model.safetensors"
    save_file({**load_file(path), "model.layers.3.eh_proj.weight": torch.ones(2)}, path)
    text = (latent_model / "config.json").read_text()
    raw = {**json.loads(text), "num_nextn_predict_layers": 0}
    (latent_model / "config.json").write_text(json.dumps(raw))
    with pytest.raises(TensorMismatch, match=r"model\.layers\.3\.eh_proj"):
        engine_of(latent_model)
    raw["num_nextn_predict_layers"] = 1
    (latent_model / "config.json").write_text(json.dumps(raw))
    assert greedy(engine_of(latent_model)) == wanted


@pytest.mark.slow
def test_what_makes_keys_and_values_of_a_latent_may_be_quantised(
    latent_model: Path, tmp_path: Path
) -> None:
    """By others: `baton quantize` leaves it. Its heads run apart, and dequantised."""
    quantize_checkpoint(latent_model, tmp_path / "rounded", "int8")
    path = tmp_path / "rounded" / "model.safetensors"
    rounded, dense = load_file(path), load_file(latent_model / "model.safetensors")
    names = [name for name in dense if "kv_b_proj" in name]
    assert names
    for name in names:
        assert torch.equal(rounded[name], dense[name])
        pieces = encode(rounded.pop(name), "int8", None)
        rounded |= {f"{name.removesuffix('.weight')}.{piece}": x for piece, x in pieces.items()}
    save_file(rounded, path, metadata={"format": "pt"})
    meant = {name: meaning(rounded, name.removesuffix(".weight")) for name in dense}
    save_file(meant, latent_model / "model.safetensors", metadata={"format": "pt"})
    assert greedy(engine_of(tmp_path / "rounded")) == expected(latent_model)


def test_the_document_lists_the_families() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    table = text.partition("| `model_type` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(FAMILIES)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping=0"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "only a causal model"),
        ({"model_type": "gemma", "hidden_act": "relu"}, "hidden_act='relu'"),
        ({"model_type": "glm4_moe", "partial_rotary_factor": 0.01}, "partial_rotary_factor=0.01"),
        ({"model_type": "glm4_moe", "rope_scaling": "yarn"}, "rope_scaling='yarn': must be an"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, 'scoring_func="softmax"'),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, 'topk_method="greedy"'),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=true"),
        ({"model_type": "deepseek_v3", "topk_group": 0.5}, "topk_group=0.5"),
        ({"model_type": "kimi_k2", "qk_rope_head_dim": 7}, "qk_rope_head_dim=7"),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 8, "topk_group": 2},
            "8 experts of 2 of 8 groups of 1",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "rope_type='longrope' without long_factor",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
            },
            "short_factor of rope has 1 numbers: this model has 48",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "yarn", "short_factor": [1.0], "long_factor": [0]},
            },
            "long_factor of rope: must be a list of positive numbers",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "factor": "4"}},
            "factor='4' of rope",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "longrope"},
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings=1: must be a number of tokens",
        ),
    ],
)
def test_what_is_not_known_of_a_family_is_named(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(text)):
        parse_config(raw)


def test_long_factors_hold_where_sequences_may_be_long(tiny_model: MakeModel) -> None:
    """Beyond the length that the model was first trained for. KV of the one and of the other is
    not taken for the same."""
    path = tiny_model(
        "phi3",
        rope_parameters=FACTORS,
        original_max_position_embeddings=32,
        max_position_embeddings=512,
    )
    asked = [prompt for prompt in prompts() if len(prompt) > 32]
    assert len(asked) == 2
    short, long = engine_of(path), engine_of(path, max_model_len=256)
    assert (short.spec.max_model_len, long.spec.max_model_len) == (32, 256)
    assert short.spec.layout.fingerprint != long.spec.layout.fingerprint
    tokens = token_ids(generate(long, asked, Sampling(), NUM_TOKENS, chunk_tokens=20))
    assert tokens == greedy_outputs(path, asked, NUM_TOKENS)
    with pytest.raises(ConfigError, match="512 tokens"):
        engine_of(path, max_model_len=513)
