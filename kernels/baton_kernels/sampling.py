"""Choose tokens from logits: bias, penalties, masks, temperature, top-k, top-p, min-p, and noise by
a counter-based hash.

A row is sampled as argmax_v (l_v + g_v) over the tokens that the filters keep: l = logits /
temperature, g_v = -log(-log(1 - u_v)), and u_v in (0, 1) is a hash of (the row's key, v). This is a
draw from softmax(l) (Gumbel-max) that depends on the row's logits and key alone, not on the batch,
the device's generator or earlier draws. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from baton_kernels.dispatch import op
from baton_kernels.host_copy import to_device

#: keep_top_p sorts a whole row only if its TOP_P_CANDIDATES best tokens do not reach top_p.
TOP_P_CANDIDATES = 256

#: Result of checked_argmax for a row that is not all finite.
NOT_FINITE = -1

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_WEYL = 0x9E3779B1


@op
def checked_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax of each row (lowest id on ties), and the same with NOT_FINITE for rows that are not
    all finite: [rows] int64 each.

    logits [rows, vocab] float32. The first result of a row that is not all finite is some id in [0,
    vocab).
    """
    chosen = logits.argmax(-1)
    return chosen, chosen.masked_fill(is_broken(logits), NOT_FINITE)


def is_broken(logits: torch.Tensor) -> torch.Tensor:
    """[rows] bool: whether any logit of the row is infinite or NaN. logits [rows, vocab]
    float32."""
    # A float32 sum is finite if and only if all terms are, short of overflow far beyond any logit.
    return ~logits.sum(-1).isfinite()


@op
def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Apply penalties in place: l = l / repetition if l > 0 else l * repetition; then l -=
    frequency * count, and l -= presence if count > 0.

    logits [rows, vocab] float32; all others [entries], one entry per (row, token) of prompt and
    output, without repeats; output_counts: occurrences in the output alone.
    """
    found = logits[rows, tokens]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= frequency * output_counts + presence * (output_counts > 0)
    logits[rows, tokens] = found


@op
def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor
) -> None:
    """Add in place: logits[row, token] += bias. All [entries], without repeats; -inf forbids a
    token."""
    logits[rows, tokens] += bias


@op
def forbid(logits: torch.Tensor, forbidden: torch.Tensor) -> None:
    """Set -inf in place where forbidden. logits [rows, vocab] float32, forbidden [rows, vocab]
    bool."""
    logits.masked_fill_(forbidden, float("-inf"))


@op
def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Set -inf in place below each row's k-th largest logit. top_k [rows] int64 in [1, vocab]; ties
    with the k-th stay."""
    largest = logits.topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, top_k[:, None] - 1)
    logits.masked_fill_(logits < threshold, float("-inf"))


@op
def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Set -inf in place outside the smallest set of most likely tokens with a total probability of
    at least top_p [rows] in (0, 1].

    Ties enter by ascending id. The likeliest token always stays.
    """
    vocab_size = logits.shape[-1]
    total = logits.logsumexp(-1)
    counts, thresholds = _nucleus(logits, total, top_p, min(TOP_P_CANDIDATES, vocab_size))
    wide = torch.nonzero(counts > TOP_P_CANDIDATES).flatten()
    if len(wide):
        counts[wide], thresholds[wide] = _nucleus(
            logits[wide], total[wide], top_p[wide], vocab_size
        )
    above = logits > thresholds[:, None]
    equal = logits == thresholds[:, None]
    missing = counts - above.sum(-1)
    kept = above | (equal & (equal.cumsum(-1) <= missing[:, None]))
    logits.masked_fill_(~kept, float("-inf"))


def _nucleus(
    logits: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Size of each row's set and the logit of its last member; the size is num_candidates + 1 if
    the candidates do not reach top_p.

    total [rows]: logsumexp of the whole rows, which gives candidates their true probabilities.
    """
    best = logits.topk(num_candidates, dim=-1).values
    probabilities = (best - total[:, None]).exp()
    reached = probabilities.cumsum(-1)
    counts = (reached - probabilities < top_p[:, None]).sum(-1).clamp_(min=1)
    is_open = (reached[:, -1] < top_p) & (num_candidates < logits.shape[-1])
    thresholds = best.gather(1, counts[:, None] - 1)[:, 0]
    return counts + is_open, thresholds


@op
def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Set -inf in place where a probability is below min_p [rows] in [0, 1] times that of the
    likeliest token."""
    gap = logits - logits.amax(-1, keepdim=True)
    logits.masked_fill_(gap < min_p.log()[:, None], float("-inf"))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words: each input bit flips each output bit with a probability of about
    1/2."""
    first, second = (m - (1 << 32) if m >> 31 else m for m in _MULTIPLIERS)
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * first
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * second
    return x ^ ((x >> 16) & 0xFFFF)


def hash_uniform(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Uniform numbers in (0, 1), [rows, num_tokens] float32. keys: [rows, 2] int32, random
    words."""
    counter = torch.arange(num_tokens, dtype=torch.int32, device=keys.device) * (_WEYL - (1 << 32))
    word = _mix(counter[None, :] ^ keys[:, :1])
    word = _mix(word ^ keys[:, 1:])
    # To unsigned, then to the middle of one of 2^32 equal cells; the last cells round to below 1.
    unsigned = word.float() + torch.where(word < 0, 2.0**32, 0.5)
    return (unsigned * 2.0**-32).clamp_(min=2.0**-33, max=1 - 2.0**-24)


@op
def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample: logits [rows, vocab] float32, scaled, -inf where filtered; keys [rows, 2] int32 ->
    ids [rows] int64."""
    uniform = hash_uniform(keys, logits.shape[-1])
    noise = -torch.log(-torch.log1p(-uniform))
    return (logits + noise).argmax(-1)


class Draw(NamedTuple):
    """Sampling parameters of a row. temperature 0: the likeliest token, without filters. top_k 0,
    top_p 1 and min_p 0 keep all; filters run in this order. key: two int32 words."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: tuple[int, int]


@op
def draw_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token per row; also return the same with NOT_FINITE for rows that are not all finite:
    [rows] int64 each. Does not wait for the device.

    logits [rows, vocab] float32, unchanged. The first result of a row that is not all finite is
    some id in [0, vocab).
    """
    device = logits.device
    drawn = [row for row, draw in enumerate(draws) if draw.temperature]
    if not drawn:
        return checked_argmax.twin(logits)
    settings = [draws[row] for row in drawn]
    index = to_device(torch.tensor(drawn), device)
    temperature = to_device(torch.tensor([s.temperature for s in settings]), device)
    keys = to_device(torch.tensor([s.key for s in settings], dtype=torch.int32), device)
    # Subtract the maximum, so that no temperature, however low, overflows to infinity.
    part = logits[index]
    scaled = (part - part.amax(-1, keepdim=True)) / temperature[:, None]
    _filter(scaled, settings)
    # Clamp for rows that are not finite: the next step may read the token's embedding before the
    # error is noticed.
    chosen = gumbel_argmax(scaled, keys).clamp_(0, scaled.shape[-1] - 1)
    if len(drawn) < len(draws):
        chosen = logits.argmax(-1).index_copy_(0, index, chosen)
    return chosen, chosen.masked_fill(is_broken(logits), NOT_FINITE)


def _filter(scaled: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Run the filters in place, each on the rows that set it. scaled [len(draws), vocab]."""
    vocab_size = scaled.shape[-1]
    top_k = {row: draw.top_k for row, draw in enumerate(draws) if 0 < draw.top_k < vocab_size}
    top_p = {row: draw.top_p for row, draw in enumerate(draws) if draw.top_p < 1.0}
    min_p = {row: draw.min_p for row, draw in enumerate(draws) if draw.min_p > 0.0}
    _keep(scaled, top_k, torch.int64, keep_top_k)
    _keep(scaled, top_p, torch.float32, keep_top_p)
    _keep(scaled, min_p, torch.float32, keep_min_p)


def _keep(
    scaled: torch.Tensor,
    values: dict[int, int] | dict[int, float],
    dtype: torch.dtype,
    keep: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Run one filter on the rows that are keys of `values`."""
    if not values:
        return
    argument = to_device(torch.tensor(list(values.values()), dtype=dtype), scaled.device)
    if len(values) == scaled.shape[0]:
        keep(scaled, argument)
        return
    index = to_device(torch.tensor(list(values)), scaled.device)
    part = scaled[index]
    keep(part, argument)
    scaled.index_copy_(0, index, part)
