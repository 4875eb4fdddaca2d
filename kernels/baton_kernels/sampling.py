"""Choose tokens from logits: bias, penalties, masks, temperature, top-k, top-p, min-p, and noise by
a counter-based hash.

A row is sampled as argmax_v (l_v + g_v), l being logits / temperature, over the tokens that the
filters keep, with g_v = -log(-log(1 - u_v)) and u_v in (0, 1) a hash of (the row's key, v). That is
a draw from softmax(l), and it depends on nothing but the row's logits and key: not on the batch,
the device's generator or earlier draws. The lowest id wins among equals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from baton_kernels.dispatch import op
from baton_kernels.host_copy import to_device

#: keep_top_p sorts a row as a whole only if this many of its best tokens do not reach top_p.
TOP_P_CANDIDATES = 256

#: What checked_argmax gives for a row that is not all finite.
NOT_FINITE = -1

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_WEYL = 0x9E3779B1


@op
def checked_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of each row's largest logit, and the same but NOT_FINITE where a logit of the
    row is none: [rows] int64 each.

    logits [rows, vocab] float32. The id that is given for a row that is not finite is any of [0,
    vocab).
    """
    chosen = logits.argmax(-1)
    return chosen, chosen.masked_fill(is_broken(logits), NOT_FINITE)


def is_broken(logits: torch.Tensor) -> torch.Tensor:
    """[rows] bool: whether any logit of the row is infinite or NaN. logits [rows, vocab]
    float32."""
    # A sum is finite exactly if its float32 terms are, but for overflow far beyond any logit.
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
    """In place, at each (row, token) that occurs in prompt or output, without repeats: l > 0 ? l /
    repetition : l * repetition, then less frequency * count and less presence if count > 0.

    logits [rows, vocab] float32; all others [entries]; output_counts are occurrences in the output
    alone.
    """
    found = logits[rows, tokens]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= frequency * output_counts + presence * (output_counts > 0)
    logits[rows, tokens] = found


@op
def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor
) -> None:
    """In place: logits[row, token] += bias, [entries] each without repeats; -inf forbids a
    token."""
    logits[rows, tokens] += bias


@op
def forbid(logits: torch.Tensor, forbidden: torch.Tensor) -> None:
    """In place: -inf where forbidden. logits [rows, vocab] float32, forbidden [rows, vocab]
    bool."""
    logits.masked_fill_(forbidden, float("-inf"))


@op
def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """In place: -inf below each row's k-th largest. top_k [rows] int64, in [1, vocab]; equals of
    the k-th stay."""
    largest = logits.topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, top_k[:, None] - 1)
    logits.masked_fill_(logits < threshold, float("-inf"))


@op
def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """In place: -inf outside the smallest set of most likely tokens whose probabilities reach top_p
    [rows] in (0, 1].

    Equals enter by ascending id. The likeliest token always stays.
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
    """Size of each row's set and the logit of its last member; a size of num_candidates + 1 if
    those do not reach top_p.

    total [rows] is the rows' logsumexp, so that candidates alone have the probabilities that they
    have in the whole row.
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
    """In place: -inf where a probability is below min_p [rows] in [0, 1] times that of the
    likeliest token."""
    gap = logits - logits.amax(-1, keepdim=True)
    logits.masked_fill_(gap < min_p.log()[:, None], float("-inf"))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words in which every input bit flips each output bit about half the
    time."""
    first, second = (m - (1 << 32) if m >> 31 else m for m in _MULTIPLIERS)
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * first
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * second
    return x ^ ((x >> 16) & 0xFFFF)


def hash_uniform(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Uniform numbers in (0, 1), [rows, num_tokens] float32; keys [rows, 2] int32 random words."""
    counter = torch.arange(num_tokens, dtype=torch.int32, device=keys.device) * (_WEYL - (1 << 32))
    word = _mix(counter[None, :] ^ keys[:, :1])
    word = _mix(word ^ keys[:, 1:])
    # To unsigned, then to the middle of one of 2^32 equal cells; the last cells round to below 1.
    unsigned = word.float() + torch.where(word < 0, 2.0**32, 0.5)
    return (unsigned * 2.0**-32).clamp_(min=2.0**-33, max=1 - 2.0**-24)


@op
def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] float32, scaled, -inf where filtered; keys [rows, 2] int32 -> [rows]
    int64."""
    uniform = hash_uniform(keys, logits.shape[-1])
    noise = -torch.log(-torch.log1p(-uniform))
    return (logits + noise).argmax(-1)


class Draw(NamedTuple):
    """How a row is drawn from. temperature: 0 for the likeliest token, whatever the others say.
    top_k 0, top_p 1 and min_p 0 keep all; they follow in that order. key: two words, int32."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: tuple[int, int]


@op
def draw_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, and the same but NOT_FINITE where a logit of the row is none: [rows]
    int64 each. Does not wait for the device.

    logits [rows, vocab] float32, which are not changed. The id that is given for a row that is not
    finite is any of [0, vocab).
    """
    device = logits.device
    drawn = [row for row, draw in enumerate(draws) if draw.temperature]
    if not drawn:
        return checked_argmax.twin(logits)
    settings = [draws[row] for row in drawn]
    index = to_device(torch.tensor(drawn), device)
    temperature = to_device(torch.tensor([s.temperature for s in settings]), device)
    keys = to_device(torch.tensor([s.key for s in settings], dtype=torch.int32), device)
    # Relative to the likeliest, so that no temperature, however low, makes an infinity of it.
    part = logits[index]
    scaled = (part - part.amax(-1, keepdim=True)) / temperature[:, None]
    _filter(scaled, settings)
    # Where logits are no numbers, any token: the next step reads its embedding before anybody can
    # know.
    chosen = gumbel_argmax(scaled, keys).clamp_(0, scaled.shape[-1] - 1)
    if len(drawn) < len(draws):
        chosen = logits.argmax(-1).index_copy_(0, index, chosen)
    return chosen, chosen.masked_fill(is_broken(logits), NOT_FINITE)


def _filter(scaled: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Filters, in place, each on the rows that ask for it. scaled [len(draws), vocab]."""
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
    """Run one filter on the rows that `values` names."""
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
