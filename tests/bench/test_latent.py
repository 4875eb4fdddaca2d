"""The two ways that bench.latent compares compute the same."""

from __future__ import annotations

import torch

from bench.latent import Heads, Prompt, absorbed, expanded


def test_expanded_keys_and_values_give_what_the_rows_give() -> None:
    torch.manual_seed(0)
    heads, prompt = Heads.random(), Prompt.random(37)
    with torch.inference_mode():
        given, wanted = absorbed(prompt, heads), expanded(prompt, heads)
    assert given.shape == (37, 16, 128)
    assert (given - wanted).abs().max() < 0.05 < wanted.abs().mean()
