"""Ranks that share the vocabulary: the likeliest token is that of one process, ties included, and
only rows that need all logits have them brought together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import EngineFault
from baton.types import Sampling
from bench.counted_ranks import count_exchanges
from engine.interface import Batch
from tests.engine.ranks.conftest import LoadRanks
from tests.support.drive_engine import generate, token_ids, whole_prompt
from tests.support.tiny_models import make_tiny_model

PROMPTS = [tuple((7 * i + 3 * j) % 256 for i in range(n)) for j, n in enumerate((1, 9, 5, 4, 7))]
GREEDY = Sampling()
#: Settings that need all logits of a row.
OTHERS = (
    Sampling(temperature=0.9, seed=3),
    Sampling(logprobs=2),
    Sampling(repetition_penalty=1.3),
    Sampling(allowed_token_ids=(9, 200)),
)


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A tiny model with other weights."""
    path = make_tiny_model(folder, vocab_size=256)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return path


def repeat_half(tensors: dict[str, torch.Tensor]) -> None:
    """The second half of the vocabulary has the logits of the first."""
    tensors["lm_head.weight"][128:] = tensors["lm_head.weight"][:128]


def repeat_one(tensors: dict[str, torch.Tensor]) -> None:
    """All tokens have one logit."""
    tensors["lm_head.weight"][:] = tensors["lm_head.weight"][0]


@pytest.mark.parametrize(("edit", "bound"), [(repeat_half, 128), (repeat_one, 1)])
def test_of_equal_logits_on_several_ranks_the_lowest_id_is_taken(
    edit: Callable[[dict[str, torch.Tensor]], None],
    bound: int,
    tmp_path: Path,
    load_ranks: LoadRanks,
) -> None:
    path = edited(tmp_path, edit)
    wanted = None
    for size in (1, 2, 4):
        found = token_ids(generate(load_ranks(path, size), PROMPTS, GREEDY, 5))
        wanted = wanted or found
        assert found == wanted
        assert max(map(max, found)) < bound


def test_rows_of_all_kinds_in_one_step_have_the_tokens_of_one_rank(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path)
    one, two = (load_ranks(path, size) for size in (1, 2))
    settings = [GREEDY, *OTHERS]
    assert generate(two, PROMPTS, settings, 5) == generate(one, PROMPTS, settings, 5)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("sampling", OTHERS)
def test_only_rows_that_need_all_logits_have_them_brought_together(
    sampling: Sampling, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, vocab_size=256)
    with count_exchanges() as counts:
        engine = load_ranks(path, 2)
        num_bytes = []
        for settings in ([GREEDY, GREEDY], [GREEDY, sampling]):
            counts.reset()
            generate(engine, PROMPTS[:2], settings, 1)
            num_bytes.append(counts.num_bytes)
    # A pair of float32 against half of a row of float32.
    assert num_bytes[1] - num_bytes[0] == 4 * 128 - 8


@pytest.mark.parametrize(
    ("name", "row", "failed"),
    [("model.embed_tokens.weight", 5, "1"), ("lm_head.weight", 200, "0,1")],
)
def test_rows_that_are_not_finite_on_some_rank_fail_alone(
    name: str, row: int, failed: str, tmp_path: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    """Rank 1 has row 200 of the output layer."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][row] = torch.nan

    engine = load_ranks(edited(tmp_path, spoil), 2)
    slices = [whole_prompt(p, GREEDY, (i,)) for i, p in enumerate([(3,), (5,)])]
    with pytest.raises(EngineFault, match="not finite") as caught:
        engine.forward(Batch(tuple(slices)))
    assert caught.value.metadata["slices"] == failed
    assert not losses
