"""What we read of config.json, and the frequencies that we make of it, are transformers' own, for
every family."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from baton.errors import UnsupportedModel
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.families.registry import FAMILIES
from engine.families.rope import ROPE_TYPES
from engine.torch.rope import make_rope

CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "glm4_moe": "Glm4MoeConfig",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "gpt_oss": "GptOssConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "kimi_k2": "DeepseekV3Config",
}
#: Families tested with random config.json files; of the others, defaults and tokens are compared
#: (see test_families).
DRAWN = ("llama", "mistral", "qwen2", "qwen3")
#: Families with attention_bias in the output layer, too.
OUTPUT_BIASED = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "olmo2",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
)

#: What transformers raises for a config.json that it does not take; it fails by the others, too.
REFUSALS = (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError)

#: Values that are wrong, or right, for some field or other.
ODD = st.sampled_from([None, True, 0, 3, 2.0, "x", [], {}])

NUMBERS = {
    "factor": st.sampled_from([1.0, 2.0, 4, 8.0]),
    "rope_theta": st.sampled_from([10000, 10000.0, 5e5, 1000000]),
    "beta_fast": st.sampled_from([16, 32.0]),
    "beta_slow": st.sampled_from([1, 2.0]),
    "mscale": st.sampled_from([0.7, 1.0]),
    "mscale_all_dim": st.sampled_from([0.5, 1.0]),
    "attention_factor": st.sampled_from([0.9, 1.2]),
    "truncate": st.booleans(),
    "low_freq_factor": st.sampled_from([1.0, 2]),
    "high_freq_factor": st.sampled_from([4.0, 8]),
    "original_max_position_embeddings": st.sampled_from([16, 64]),
}


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any]:
    """What a config.json says of rope, in old spelling or new."""
    rope_type = draw(st.sampled_from(sorted(ROPE_TYPES.keys() - {"dynamic_yarn"})))
    numbers = {
        name: draw(values)
        for name, values in NUMBERS.items()
        if name in ROPE_TYPES[rope_type] or draw(st.booleans())
    }
    if draw(st.booleans()):
        return {"rope_parameters": {"rope_type": rope_type, **numbers}}
    theta = numbers.pop("rope_theta", None)
    beside = {} if theta is None else {"rope_theta": theta}
    spelling = draw(st.sampled_from(["type", "rope_type"]))
    return {"rope_scaling": {spelling: rope_type, **numbers}, **beside}


@st.composite
def configs(draw: st.DrawFn, *, oddities: int = 0) -> dict[str, Any]:
    """A config.json: any fields left out, and up to `oddities` of them of a wrong kind, perhaps."""
    family = draw(st.sampled_from(DRAWN))
    sizes = {
        "vocab_size": 100,
        "hidden_size": draw(st.sampled_from([48 * 8, 64 * 8])),
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([16, 32])),
        "max_position_embeddings": draw(st.sampled_from([128, 256])),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([None, 8, 32])),
        "max_window_layers": draw(st.sampled_from([0, 1, 2, 28])),
        "layer_types": draw(
            st.lists(
                st.sampled_from(["full_attention", "sliding_attention"]), min_size=3, max_size=3
            )
        ),
        **draw(ropes()),
    }
    kept = {
        name: value for name, value in sizes.items() if name == "hidden_size" or draw(st.booleans())
    }
    for name in draw(st.lists(st.sampled_from(sorted(sizes)), max_size=oddities)):
        kept[name] = draw(ODD)
    return {"model_type": family, **kept}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns of each key that it does not need; imported, it has set its own level."""
    import transformers  # noqa: F401

    caplog.set_level(logging.ERROR, logger="transformers")


def theirs_of(raw: dict[str, Any]) -> Any:
    import transformers

    config_class: Any = getattr(transformers, CLASSES[raw["model_type"]])
    return config_class.from_dict(copy.deepcopy(raw))


def frequencies_of(theirs: Any, length: int) -> tuple[torch.Tensor, float]:
    """As the model's own rotary embedding has them for a context of `length` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = theirs.rope_parameters["rope_type"]
    if rope_type == "default":
        head_dim = getattr(theirs, "head_dim", None)
        dim = head_dim or theirs.hidden_size // theirs.num_attention_heads
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (theirs.rope_parameters["rope_theta"] ** exponent), 1.0
    is_grown = rope_type == "dynamic" and length > theirs.max_position_embeddings
    return ROPE_INIT_FUNCTIONS[rope_type](
        _with_head_dim(theirs), seq_len=torch.tensor(length) if is_grown else None
    )


def _with_head_dim(theirs: Any) -> Any:
    """Some functions of transformers' want a head_dim that is no null, where an attention layer
    does without."""
    twin = copy.deepcopy(theirs)
    twin.head_dim = getattr(theirs, "head_dim", None) or (
        theirs.hidden_size // theirs.num_attention_heads
    )
    return twin


def check_same(ours: ModelConfig, theirs: Any) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    if ours.traits.latent is None:
        assert ours.num_kv_heads == theirs.num_key_value_heads
        head_dim = getattr(theirs, "head_dim", None)
        assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    else:
        check_latent(ours, theirs)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.is_tied == theirs.tie_word_embeddings
    # Other families have no such biases, whatever a config.json says beside their fields.
    assert ours.has_output_bias == (ours.family in OUTPUT_BIASED and theirs.attention_bias)
    assert ours.has_mlp_bias == (ours.family == "llama" and theirs.mlp_bias)
    rope, local = theirs.rope_parameters, ours.traits.window_rope
    if local is not None:
        assert local.theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.rope_type == rope["rope_type"]
    assert ours.rotary_dim == int(ours.rope_width * rope.get("partial_rotary_factor", 1.0))
    check_experts(ours, theirs)
    if ours.family in ("qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss"):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in ours.windows]
        wanted = theirs.layer_types if theirs.sliding_window else ["full_attention"] * len(kinds)
        assert kinds == wanted
    window = getattr(theirs, "sliding_window", None) if ours.family != "llama" else None
    assert set(ours.windows) <= {None, window}
    if ours.family == "mistral":
        assert ours.windows == (window,) * ours.num_layers


def check_latent(ours: ModelConfig, theirs: Any) -> None:
    latent = ours.traits.latent
    assert latent is not None
    assert (latent.rank, latent.query_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
    assert (latent.plain_dim, latent.rope_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
    assert latent.value_dim == theirs.v_head_dim
    assert latent.is_interleaved == getattr(theirs, "rope_interleave", True)
    assert (ours.num_kv_heads, ours.head_dim) == (1, theirs.kv_lora_rank + theirs.qk_rope_head_dim)
    assert ours.traits.attention_scale == theirs.qk_head_dim**-0.5


def check_experts(ours: ModelConfig, theirs: Any) -> None:
    experts = ours.traits.experts
    assert (experts is None) == (not hasattr(theirs, "num_experts_per_tok"))
    if experts is None:
        return
    name = "n_routed_experts" if ours.traits.latent else "num_local_experts"
    assert experts.num_experts == getattr(theirs, name)
    assert experts.num_chosen == theirs.num_experts_per_tok
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert experts.intermediate_size == width
    assert experts.is_normalised == getattr(theirs, "norm_topk_prob", True)
    assert experts.scale == getattr(theirs, "routed_scaling_factor", 1.0)


def check_frequencies(ours: ModelConfig, theirs: Any) -> None:
    longest = ours.max_position_embeddings
    rope = make_rope(ours, torch.device("cpu"))
    for length in (longest, longest + 3):
        inv_freq, scaling = frequencies_of(theirs, length)
        (last, *_), _ = rope.frequencies(torch.tensor([length]))
        assert torch.equal(last, inv_freq), ours.rope
        assert rope.scaling == scaling


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_the_familys_own(family: str) -> None:
    raw: dict[str, Any] = {"model_type": family}
    if family == "glm4_moe":
        raw["head_dim"] = 128  # its own is odd
    if family == "deepseek_v2":
        raw["num_experts_per_tok"] = 6  # its own is null
    check_same(parse_config(raw), theirs_of(raw))


def test_every_family_that_is_served_is_compared() -> None:
    assert set(CLASSES) == set(FAMILIES)


@settings(deadline=None, max_examples=100)
@given(raw=configs())
def test_what_transformers_reads_is_read_the_same(raw: dict[str, Any]) -> None:
    try:
        theirs = theirs_of(raw)
    except REFUSALS:
        reject()
    if theirs.num_attention_heads % theirs.num_key_value_heads:
        reject()  # a model that transformers cannot run, either
    ours = parse_config(raw)
    check_same(ours, theirs)
    check_frequencies(ours, theirs)


@settings(deadline=None, max_examples=100)
@given(raw=configs(oddities=2))
def test_what_transformers_refuses_is_refused(raw: dict[str, Any]) -> None:
    try:
        theirs = theirs_of(raw)
        frequencies_of(theirs, theirs.max_position_embeddings)
    except REFUSALS:
        with pytest.raises(UnsupportedModel):
            parse_config(raw)
