"""Any decoder of transformers through our engine: greedy tokens are those of `generate` in float32,
whatever the chunks, the batch, a handoff or drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from baton.types import Sampling
from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.torch.engine import TorchEngine
from tests.engine.transformers.conftest import NUM_TOKENS, PROMPT_LENGTHS, Case, load, prompts
from tests.support.architectures import ARCHITECTURES, make_checkpoint
from tests.support.drive_engine import generate, token_ids
from tests.support.kernel_watch import watching
from tests.support.quantized_models import FORMATS, of_transposed, quantize
from tests.support.transformers_greedy import greedy_outputs

CaseOf = Callable[[str], Case]

GREEDY = Sampling()
#: Attention with ALiBi, with windows by turns and with sinks, layers with a state; the others take
#: their turn with the slow ones.
FEW = ("bloom", "gpt_oss", "jamba")
#: `make test` also tries: states that continue with several tokens at once, a gated delta rule,
#: layers that read another's KV, windows in most layers, rotary parts of a head, learned positions,
#: experts. It leaves all others to .ci/run.
SOME = (
    *("dbrx", "gemma3_text", "gemma3n_text", "gpt2", "gpt_neox", "granitemoehybrid", "mixtral"),
    "qwen3_next",
)
#: Where sigmoids and softmaxes are narrower than a vector, torch rounds their last element one way
#: or another with the size of the batch; DBRX multiplies its experts' weights by itself.
ROUNDED = ("afmoe", "dbrx", "dots1", "glm4_moe", "minimax_m2", "phimoe", "qwen2_moe")
#: Architectures with layer weights [in, out].
TRANSPOSED = ("gpt2",)
#: Layers with a state add up a chunk's tokens in another order than those that come one by one, and
#: cannot go back to where a draft was not accepted.
STATES = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lara_mini", "lfm2"),
    *("olmo_hybrid", "qwen3_5_text", "qwen3_next"),
)


def of(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each of these."""
    slow, long = pytest.mark.slow, pytest.mark.long
    found = [
        name if name in FEW else pytest.param(name, marks=[slow] if name in SOME else [slow, long])
        for name in names
    ]
    return pytest.mark.parametrize("name", found)


each = of(ARCHITECTURES)


@each
def test_greedy_tokens_are_those_of_generate(
    name: str,
    case_of: CaseOf,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    case = case_of(name)
    with watching(monkeypatch) as watch:
        outputs = generate(case.engine, prompts(), GREEDY, NUM_TOKENS)
    assert token_ids(outputs) == case.expected
    assert len({tuple(output) for output in case.expected}) == len(PROMPT_LENGTHS)
    if groups_of(case.engine.spec.layout).records:
        watch.torch.add("states")
    record_property("kernels", watch.summary)
    assert library() is None or "attention" not in watch.torch


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """What tools quantise: matrices of layers, which have numbers, but routers and the like; and of
    these what groups of 16, and words of eight levels, divide."""
    is_layers = name.endswith(".weight") and any(part.isdigit() for part in name.split("."))
    return is_layers and tensor.dim() == 2 and not any(size % 16 for size in tensor.shape)


def quantised(name: str, form: str, folder: Path) -> tuple[Path, Path]:
    """(the checkpoint of an architecture in a format, the dense one that means the same)."""
    encode, quantization = FORMATS[form]
    if name in TRANSPOSED:
        encode = of_transposed(encode)
    dense = make_checkpoint(folder / "dense", name)
    path = quantize(dense, folder / "quantised", encode, quantization, is_quantised)
    return path, dense


@pytest.mark.few_cases(1)
@each
def test_gptq_tokens_are_those_of_what_the_levels_mean(name: str, tmp_path: Path) -> None:
    check_quantised(name, "gptq", tmp_path)


@pytest.mark.few_cases(1)
@of(name for name in ARCHITECTURES if name not in TRANSPOSED)
def test_float8_tokens_are_those_of_what_the_codes_mean(name: str, tmp_path: Path) -> None:
    """By blocks, as MiniMax and Qwen publish theirs."""
    check_quantised(name, "fp8", tmp_path)


def check_quantised(name: str, form: str, folder: Path) -> None:
    path, dense = quantised(name, form, folder)
    outputs = generate(load(path), prompts(), GREEDY, NUM_TOKENS)
    assert token_ids(outputs) == greedy_outputs(dense, prompts(), NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "compressed-tensors"])
def test_other_formats_are_read_too(form: str, tmp_path: Path) -> None:
    check_quantised("gptj", form, tmp_path)


@pytest.mark.slow
def test_quantised_weights_are_dequantised_to_the_type_that_is_served(tmp_path: Path) -> None:
    path, dense = quantised("gptj", "gptq", tmp_path)
    rounded, plain = (
        logits(load(each, dtype="bfloat16"), prompts()[2], (), ()) for each in (path, dense)
    )
    assert torch.equal(rounded, plain)


@pytest.mark.few_cases(1)
@each
def test_chunks_change_nothing(name: str, case_of: CaseOf) -> None:
    """Prompts go in by chunks beside sequences that decode; the last chunk of one is a single
    token."""
    case = case_of(name)
    for chunk_tokens in (1, 7):
        outputs = generate(case.engine, prompts(), GREEDY, NUM_TOKENS, chunk_tokens=chunk_tokens)
        assert token_ids(outputs) == case.expected


@pytest.mark.few_cases(1)
@each
def test_a_handoff_changes_nothing(name: str, case_of: CaseOf) -> None:
    """One engine computes a prompt, another, with other blocks, goes on from its KV alone."""
    case = case_of(name)
    receiver = load(case.path, block_size=5, num_blocks=24)
    assert receiver.spec.layout.fingerprint == case.engine.spec.layout.fingerprint
    for prompt, expected in zip(prompts(), case.expected, strict=True):
        tokens = [*prompt, *step(case.engine, prompt, 0, range(8, 12), (len(prompt) - 1,))]
        hand_over(case.engine, range(8, 12), receiver, range(3, 11), len(prompt))
        while len(tokens) < len(prompt) + NUM_TOKENS:
            new = tokens[-1:]
            tokens += step(receiver, new, len(tokens) - 1, range(3, 11), (0,))
        assert tokens[len(prompt) :] == expected


@of(name for name in ARCHITECTURES if name not in STATES)
def test_drafts_change_nothing(name: str, case_of: CaseOf) -> None:
    """Drafts, of which some are wrong, are verified in one step beside the last token; what they
    wrote is overwritten."""
    case = case_of(name)
    for prompt, expected in zip(prompts(), case.expected, strict=True):
        output = step(case.engine, prompt, 0, range(8, 12), (len(prompt) - 1,))
        while len(output) < NUM_TOKENS:
            drafts = expected[len(output) : len(output) + 3]
            # Each second guess ends in a wrong one.
            if len(output) % 2 and drafts:
                drafts[-1] = (drafts[-1] + 1) % 96
            new = [output[-1], *drafts]
            start = len(prompt) + len(output) - 1
            sampled = step(case.engine, new, start, range(8, 12), range(len(new)))
            while drafts and sampled[0] == drafts[0]:
                output.append(sampled.pop(0))
                drafts.pop(0)
            output.append(sampled[0])
        assert output[:NUM_TOKENS] == expected


@pytest.mark.few_cases(1)
@each
def test_logits_are_the_same_to_the_bit_in_any_batch(name: str, case_of: CaseOf) -> None:
    """In chunks, in a batch with another sequence, and alone."""
    if name in (*ROUNDED, *STATES):
        pytest.skip("torch rounds some of its functions by the size of the batch")
    engine = case_of(name).engine
    prompt, other = prompts()[2], prompts()[2][::-1]
    whole = logits(engine, prompt, (), ())
    for cuts, beside in (((1,), ()), ((7, 20), other), (range(1, len(prompt)), other)):
        assert torch.equal(logits(engine, prompt, tuple(cuts), beside), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_anothers_kv_have_none(name: str, case_of: CaseOf) -> None:
    """Two of four compute KV, each of which is done once in a step."""
    engine = case_of(name).engine
    layout = engine.spec.layout
    assert (layout.num_layers, layout.window, layout.windowed_layers) == (2, 8, (0,))
    done: list[tuple[int, int]] = []
    part = SequenceSlice((1, 2, 3), 0, range(8, 12), (SampleRow(2, GREEDY, (), 0),))
    engine.forward(Batch((part,)), lambda *layers: done.append(layers))
    assert [layer for first, num in done for layer in range(first, first + num)] == [0, 1]


def step(
    engine: TorchEngine, new: Sequence[int], start: int, table: range, offsets: Sequence[int]
) -> list[int]:
    """Greedy tokens after some of a sequence's new tokens."""
    rows = tuple(SampleRow(offset, GREEDY, (), 0) for offset in offsets)
    ((*samples,),) = engine.forward(Batch((SequenceSlice(tuple(new), start, table, rows),)))
    return [sample.token_id for sample in samples]


def hand_over(
    sender: TorchEngine, sources: range, receiver: TorchEngine, targets: range, num_tokens: int
) -> None:
    """Move the KV of a sequence's first tokens, and the states after them."""
    layout = sender.spec.layout
    pieces = [KvRange(0, num_tokens, 0, layout.num_layers)]
    if groups_of(layout).records:
        pieces += groups_of(layout).records_after(num_tokens)
    for piece in pieces:
        packed = bytearray(groups_of(layout).num_bytes(piece))
        sender.kv.pack(sources, piece, memoryview(packed))
        receiver.kv.unpack(targets, piece, memoryview(packed))


def logits(
    engine: TorchEngine, prompt: Sequence[int], cuts: Sequence[int], other: Sequence[int]
) -> torch.Tensor:
    """After each token of a prompt, which goes in cut in pieces, each beside another sequence."""
    parts = []
    for start, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
        rows = tuple(SampleRow(i, GREEDY, (), 0) for i in range(end - start))
        slices = [SequenceSlice(tuple(prompt[start:end]), start, range(8, 12)[::-1], rows)]
        if other:
            slices.insert(0, SequenceSlice(tuple(other[: end - start + 3]), 0, range(12, 20)))
        parts.append(engine.logits(Batch(tuple(slices))))
    return torch.cat(parts)
