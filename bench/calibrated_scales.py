"""Quality of float8 with one calibrated scale a tensor, beside a scale for each row.

    python -m bench.calibrated_scales models/baton-py-6m

Published float8 checkpoints carry scales calibrated on other text: one for the inputs of each
linear layer (`activation_scheme: static`), one for the keys and one for the values of each
attention layer (`k_scale`, `v_scale`). Baton rounds with a scale for each row: a token's inputs, a
token's key or value in a head. Here transformers' code runs the model in float32 with exact
weights; only the inputs of linear layers, or keys and values, are rounded to e4m3 in each way. A
calibrated scale is the largest magnitude in windows that are not measured, over 448. Text: as
bench.quantization.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baton_kernels.quantize_rows import LIMITS, quantize_rows
from bench.machine import document_of, now, publish
from bench.quantization import windows
from bench.suite.markdown import table
from engine.checkpoint import resolve_checkpoint
from engine.families.read import read_quantization
from engine.torch.weights import read_dequantized

_FLOAT8 = torch.float8_e4m3fn
#: Values [..., size] of the tensor with that name, rounded.
Rounding = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Quality:
    """One way of rounding one kind of tensors, compared with none. divergence: mean KL, in nats.
    num_better: windows with a smaller divergence than by the other way."""

    what: str
    scales: str
    perplexity: float
    divergence: float
    num_better: int


def by_row(_name: str, values: torch.Tensor) -> torch.Tensor:
    """Round with a scale for each row, as engines do."""
    codes, scales = quantize_rows(values, _FLOAT8)
    return codes.float() * scales[..., None]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Rounding with one scale a tensor. peaks: largest magnitude, by name; grows in `watch`."""

    peaks: dict[str, float]

    def watch(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Note the magnitude; the values stay."""
        self.peaks[name] = max(self.peaks.get(name, 0.0), float(values.abs().max()))
        return values

    def rounded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Round; what is beyond the calibrated range becomes its end."""
        limit = LIMITS[_FLOAT8]
        scale = max(self.peaks[name], 1e-12) / limit
        return (values / scale).clamp(-limit, limit).to(_FLOAT8).float() * scale


class Subject:
    """A model by transformers' code, in float32."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        from engine.transformers.describe import read_transformers_config

        maker: Any = AutoModelForCausalLM
        path = Path(folder)
        config = read_transformers_config(path)
        source: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32}
        quantization = read_quantization(path)
        if quantization is None:
            model = maker.from_pretrained(path, config=config, **source)
        else:
            # A GGUF file's, say.
            model = maker.from_config(config, **source)
            tensors, _ = read_dequantized(path, quantization, torch.float32, frozenset())
            model.load_state_dict(tensors, strict=False)
        self._model = model.eval()
        head = self._model.get_output_embeddings()
        self._linears = [
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        ]

    def scores(self, window: Sequence[int]) -> torch.Tensor:
        """Log probabilities [tokens, vocab] after each token of the window."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([window]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    @contextmanager
    def activations(self, rounding: Rounding) -> Iterator[None]:
        """The inputs of linear layers are rounded."""

        def hook_of(name: str) -> Callable[..., tuple[torch.Tensor]]:
            return lambda _module, given: (rounding(name, given[0]),)

        hooks = [module.register_forward_pre_hook(hook_of(name)) for name, module in self._linears]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def kv(self, rounding: Rounding) -> Iterator[None]:
        """Keys (after their rotation) and values are rounded, the new token's too."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def attend(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *rest: Any,
            **settings: Any,
        ) -> Any:
            layer = module.layer_idx
            key, value = rounding(f"{layer} keys", key), rounding(f"{layer} values", value)
            return sdpa_attention_forward(module, query, key, value, *rest, **settings)

        functions: Any = ALL_ATTENTION_FUNCTIONS
        functions["sdpa"] = attend
        try:
            yield
        finally:
            del functions["sdpa"]


def measure(
    subject: Subject, windows: Sequence[Sequence[int]], calibration: Sequence[Sequence[int]]
) -> Iterator[Quality]:
    """No rounding; then each kind of tensors with both scales."""
    exact = [subject.scores(window[:-1]) for window in windows]
    yield Quality("nothing", "", _perplexity(exact, windows), 0.0, 0)
    for what, changed in (("inputs of layers", subject.activations), ("KV", subject.kv)):
        calibrated = Calibrated({})
        with changed(calibrated.watch):
            for window in calibration:
                subject.scores(window[:-1])
        found = []
        for rounding in (by_row, calibrated.rounded):
            with changed(rounding):
                scores = [subject.scores(window[:-1]) for window in windows]
            found.append((_perplexity(scores, windows), _divergences(scores, exact)))
        for (perplexity, own), (_, other), scales in zip(
            found, reversed(found), ("each row", "calibrated, one a tensor"), strict=True
        ):
            num_better = sum(a < b for a, b in zip(own, other, strict=True))
            yield Quality(what, scales, perplexity, sum(own) / len(own), num_better)


def _perplexity(scores: Sequence[torch.Tensor], windows: Sequence[Sequence[int]]) -> float:
    nats = [
        -found.gather(1, torch.tensor(window[1:])[:, None]).mean()
        for found, window in zip(scores, windows, strict=True)
    ]
    return math.exp(float(torch.stack(nats).mean()))


def _divergences(scores: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """Mean KL of each window, in nats."""
    return [
        float((true.exp() * (true - found)).sum(-1).mean())
        for found, true in zip(scores, exact, strict=True)
    ]


def table_of(found: Sequence[Quality], num_windows: int) -> str:
    """Markdown."""
    headings = ("Rounded to float8", "Scale", "Perplexity", "KL, nats", "Better windows")
    rows = [
        [
            *(q.what, q.scales, f"{q.perplexity:.4f}", f"{q.divergence:.2e}"),
            f"{q.num_better} of {num_windows}" if q.scales else "",
        ]
        for q in found
    ]
    return table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder, or GGUF file")
    parser.add_argument("--tokens", type=int, default=16384, help="half of them calibrate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = now()
    options.model = str(resolve_checkpoint(options.model))
    pieces = windows(Path(options.model), options.tokens)
    num_measured = len(pieces) // 2
    found = list(measure(Subject(options.model), pieces[:num_measured], pieces[num_measured:]))
    body = f"{num_measured} windows of at most 512 tokens.\n\n{table_of(found, num_measured)}"
    data = {"quality": [asdict(q) for q in found]}
    publish(document_of("bench.calibrated_scales", started, data), options.json, lambda _: body)


if __name__ == "__main__":
    main()
