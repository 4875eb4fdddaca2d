"""Libraries that compute prompts' attention agree with the reference, and get what their functions
expect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from baton.errors import ConfigError
from baton.types import Sampling
from baton_kernels import attention_backends
from baton_kernels.attention_backends import (
    LIBRARIES,
    AttentionBackend,
    BackendPlan,
    PackedPrompts,
    load_backend,
    prompt_backend,
)
from baton_kernels.paged_attention import AttentionSlice
from bench.gpu.paged_batch import Heads, make_paged_batch, reference_attention
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.pairwise import pairwise
from tests.support.tiny_models import make_tiny_model

HEADS = Heads(4, 2, 16)
BLOCK_SIZE = 8
#: (cached, new) tokens: alone, with prompts before and behind it, fresh ones and later chunks.
MIXES = (
    ((0, 40),),
    ((30, 1), (0, 40), (0, 17), (13, 2)),
    ((64, 33), (5, 1), (0, 20), (7, 25)),
    ((100, 17), (40, 60)),
    ((9, 1), (0, 16)),
)


def attend_packed(prompts: PackedPrompts) -> torch.Tensor:
    """By the formula of the module's docstring, head by head."""
    out = torch.empty_like(prompts.query)
    group = prompts.query.shape[1] // prompts.key.shape[1]
    for i in range(len(prompts.query_ends) - 1):
        first, last = prompts.query_ends[i : i + 2]
        begin, end = prompts.key_ends[i : i + 2]
        at = torch.arange(end - begin)
        query_at = at[end - begin - (last - first) :, None]
        hidden = at > query_at
        if prompts.window is not None:
            hidden |= at <= query_at - prompts.window
        for head in range(prompts.query.shape[1]):
            keys, values = (
                x[begin:end, head // group].double() for x in (prompts.key, prompts.value)
            )
            scores = prompts.query[first:last, head].double() @ keys.T * prompts.scale
            out[first:last, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    return out


def stand_in(name: str) -> ModuleType:
    """A library that has the function that is called, with the parameters that it is called by."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)

    def varlen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: torch.Tensor,
        key_ends: torch.Tensor,
        most: int,
        most_keys: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert window_size[1] == 0
        assert ends.dtype == key_ends.dtype == torch.int32
        assert most == ends.diff().max()
        assert most_keys == key_ends.diff().max()
        window = None if window_size[0] < 0 else window_size[0] + 1
        both = tuple(ends.tolist()), tuple(key_ends.tolist())
        return attend_packed(PackedPrompts(query, key, value, *both, scale, window))

    def varlen_attn(*args: object, enable_gqa: bool = False, **kwargs: object) -> torch.Tensor:
        query, key = args[:2]
        assert enable_gqa == (query.shape[1] != key.shape[1])  # type: ignore[attr-defined]
        return varlen(*args, **kwargs)  # type: ignore[arg-type]

    def flash_attn_varlen_func(
        *args: object, softmax_scale: float, causal: bool, window_size: tuple[int, int]
    ) -> torch.Tensor:
        assert causal
        return varlen(*args, scale=softmax_scale, window_size=window_size)  # type: ignore[arg-type]

    def single_prefill_with_kv_cache(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
    ) -> torch.Tensor:
        assert causal
        ends = torch.tensor([[0, len(query)], [0, len(key)]], dtype=torch.int32)
        longest = len(query), len(key)
        window = (window_left, 0)
        return varlen(query, key, value, *ends, *longest, scale=sm_scale, window_size=window)

    for function in (varlen_attn, flash_attn_varlen_func, single_prefill_with_kv_cache):
        setattr(module, function.__name__, function)
    return module


def backend_of(name: str) -> AttentionBackend:
    if name == "sdpa":
        return load_backend(name)
    return prompt_backend(name, "", LIBRARIES[name].make(stand_in(name)))


@pairwise(name=list(LIBRARIES), window=[None, 12, 70], max_gathered=[64, 8192])
def test_agrees_with_the_formula(
    name: str, window: int | None, max_gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_backends, "MAX_GATHERED_KEYS", max_gathered)
    backend = backend_of(name)
    for number, mix in enumerate(MIXES):
        generator = torch.Generator().manual_seed(number)
        batch = make_paged_batch(mix, HEADS, BLOCK_SIZE, torch.float32, generator)
        plan = backend.plan(batch.slices, batch.pool, HEADS.num_heads, 0.3, window)
        has_prompts = any(new > 16 for _, new in mix)
        assert isinstance(plan, BackendPlan) == has_prompts
        got = backend.attend(
            *(batch.query, batch.key, batch.value, batch.pool, batch.layer, plan), None
        )
        torch.testing.assert_close(
            got.double(), reference_attention(batch, 0.3, window), atol=1e-5, rtol=1e-5
        )


def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    """In float32, prompts in chunks beside sequences that decode."""
    path = str(make_tiny_model(tmp_path / "model", "qwen3"))
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (70, 3, 45)]
    answers = []
    for name in ("auto", "sdpa"):
        engine = load_engine(path, num_blocks=32, attention_backend=name, dtype="float32")
        sampling = Sampling(temperature=0.0)
        answers.append(token_ids(generate(engine, prompts, sampling, 5, chunk_tokens=30)))
        assert ("sdpa" in engine.spec.numerics.kernels) == (name == "sdpa")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "family", "says"),
    [
        ({"attention_backend": "flash-attn"}, "llama", "pip install flash-attn"),
        ({"attention_backend": "flashinfer"}, "llama", "pip install flashinfer-python"),
        ({"attention_backend": "triton"}, "llama", "no such kernels for cpu"),
        ({"attention_backend": "varlen"}, "llama", "on GPUs"),
        ({"attention_backend": "sdpa", "kv_cache_dtype": "int8"}, "llama", "not int8"),
        ({"attention_backend": "sdpa"}, "gemma2", "soft-capped"),
        ({"attention_backend": "sdpa", "tensor_parallel_size": 2}, "llama", "several ranks"),
        ({"attention_backend": "sdpa", "model_impl": "transformers"}, "llama", "transformers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: dict[str, str], family: str, says: str, tmp_path: Path
) -> None:
    if "pip" in says and find_spec(LIBRARIES[options["attention_backend"]].module):
        pytest.skip("it is installed here")
    path = make_tiny_model(tmp_path / "model", family)
    with pytest.raises(ConfigError, match="attention_backend=.*" + says):
        load_engine(str(path), num_blocks=8, dtype="float32", **options)


def test_a_library_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Callable[..., None] = lambda query, is_causal: None  # noqa: E731, ARG005
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = old  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__spec__ = ModuleSpec(module.__name__, None)
    assert "lacks enable_gqa, scale, window_size" in attention_backends.why_not("varlen")


def test_the_batch_invariant_plan_is_made_on_the_pools_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton launches on the thread's current device: here the last GPU of several."""
    pytest.importorskip("triton")
    from baton_kernels.gpu import paged_attention

    pool = torch.zeros(1, 1, 2, 1, 16, 8)
    calls: list[object] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        assert tensor is pool
        calls.append("enter")
        yield
        calls.append("leave")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(
        paged_attention, "plan_attention", lambda *_, choose: calls.append(choose.__name__)
    )
    attention_backends.batch_invariant().plan([AttentionSlice(0, 1, 0, [0])], pool, 1, 1.0, None)
    assert calls == ["enter", "fixed_tile", "leave"]
