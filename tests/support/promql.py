"""The part of PromQL that our board speaks, evaluated over scraped pages: enough to tell a panel
with data from one without.

    expr := term (("+" | "-" | "*" | "/") term)*           vector with vector: by equal labels
    term := number | "(" expr ")" | name "(" args ")"
            | aggregation [by (labels)] "(" expr ")" | selector ["[" time "]"]

`rate` is the difference of the two newest samples over their distance, and needs both, as
Prometheus does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]

_TOKEN = re.compile(
    r'\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)|(?P<string>"[^"]*")'
    r"|(?P<op>!=|=~|!~|[-+*/(){}\[\],=]))"
)
_AGGREGATIONS: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max}


@dataclass(frozen=True)
class Scrape:
    """All samples of one moment, in seconds. Names and labels lead to values; "instance" tells the
    page."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]


def scrape(at_s: float, pages: Mapping[str, str]) -> Scrape:
    """What Prometheus keeps of the pages of some instances."""
    samples: dict[tuple[str, Labels], float] = {}
    for instance, page in pages.items():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {**sample.labels, "instance": instance}
                key = (sample.name, frozenset(labels.items()))
                assert key not in samples, f"twice on a page: {key}"
                samples[key] = float(sample.value)
    return Scrape(at_s, samples)


def evaluate(expression: str, old: Scrape, new: Scrape) -> Vector:
    """Raises ValueError for what is not in the grammar."""
    parser = _Parser(_tokens(expression), old, new)
    value = parser.expr()
    if parser.rest:
        raise ValueError(f"{expression}: not understood from {parser.rest} on")
    return value if isinstance(value, dict) else {frozenset(): value}


def has_data(vector: Vector) -> bool:
    """Whether a board would draw anything of it."""
    return any(math.isfinite(value) for value in vector.values())


def _tokens(text: str) -> list[str]:
    tokens, end = [], 0
    text = re.sub(r"\[[^\]]+\]", "[60]", text).strip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise ValueError(f"{text}: not understood at {text[end:]!r}")
        tokens.append(match.group().strip())
        end = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str], old: Scrape, new: Scrape) -> None:
        self.rest = tokens
        self._old = old
        self._new = new

    def expr(self) -> Vector | float:
        left = self._product()
        while self.rest and self.rest[0] in "+-":
            left = _binary(self._take(), left, self._product())
        return left

    def _product(self) -> Vector | float:
        left = self._term()
        while self.rest and self.rest[0] in "*/":
            left = _binary(self._take(), left, self._term())
        return left

    def _term(self) -> Vector | float:
        token = self._take()
        if token[0].isdigit():
            return float(token)
        if token == "(":
            value = self.expr()
            self._take(")")
            return value
        if token in _AGGREGATIONS:
            return self._aggregation(token)
        if token == "rate":
            self._take("(")
            value = self._rate(self._take())
            self._take(")")
            return value
        if token == "histogram_quantile":
            self._take("(")
            quantile = self.expr()
            self._take(",")
            buckets = self.expr()
            self._take(")")
            assert isinstance(quantile, float)
            assert isinstance(buckets, dict)
            return _histogram_quantile(quantile, buckets)
        return _select(self._new, token, self._matchers())

    def _aggregation(self, name: str) -> Vector:
        by = frozenset[str]()
        if self.rest[0] == "by":
            self._take("by")
            by = frozenset(self._names())
        self._take("(")
        value = self.expr()
        self._take(")")
        assert isinstance(value, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, number in value.items():
            groups.setdefault(frozenset((k, v) for k, v in labels if k in by), []).append(number)
        return {labels: _AGGREGATIONS[name](numbers) for labels, numbers in groups.items()}

    def _names(self) -> list[str]:
        self._take("(")
        names = [self._take()]
        while self.rest[0] == ",":
            self._take(",")
            names.append(self._take())
        self._take(")")
        return names

    def _rate(self, name: str) -> Vector:
        matchers = self._matchers()
        self._take("[")
        self._take()
        self._take("]")
        old = _select(self._old, name, matchers)
        new = _select(self._new, name, matchers)
        elapsed_s = self._new.at_s - self._old.at_s
        return {key: (new[key] - old[key]) / elapsed_s for key in new if key in old}

    def _matchers(self) -> list[tuple[str, str, str]]:
        matchers: list[tuple[str, str, str]] = []
        if not self.rest or self.rest[0] != "{":
            return matchers
        self._take("{")
        while self.rest[0] != "}":
            name, op, value = self._take(), self._take(), self._take().strip('"')
            matchers.append((name, op, value))
            if self.rest[0] == ",":
                self._take(",")
        self._take("}")
        return matchers

    def _take(self, expected: str | None = None) -> str:
        if not self.rest or (expected is not None and self.rest[0] != expected):
            raise ValueError(f"{expected or 'more'} expected before {self.rest}")
        return self.rest.pop(0)


def _select(source: Scrape, name: str, matchers: list[tuple[str, str, str]]) -> Vector:
    found: Vector = {}
    for (sample_name, labels), value in source.samples.items():
        if sample_name != name:
            continue
        values = dict(labels)
        if all(_matches(values.get(label, ""), op, text) for label, op, text in matchers):
            found[labels] = value
    return found


def _matches(actual: str, op: str, text: str) -> bool:
    match op:
        case "=":
            return actual == text
        case "!=":
            return actual != text
        case "=~":
            return re.fullmatch(text, actual) is not None
        case "!~":
            return re.fullmatch(text, actual) is None
    raise ValueError(f"no such matcher: {op}")


def _binary(op: str, left: Vector | float, right: Vector | float) -> Vector | float:
    if isinstance(left, float) and isinstance(right, float):
        return _apply(op, left, right)
    if isinstance(left, float):
        assert isinstance(right, dict)
        return {key: _apply(op, left, value) for key, value in right.items()}
    if isinstance(right, float):
        return {key: _apply(op, value, right) for key, value in left.items()}
    return {key: _apply(op, left[key], right[key]) for key in left if key in right}


def _apply(op: str, left: float, right: float) -> float:
    if op == "/":
        return left / right if right else math.nan
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def _histogram_quantile(quantile: float, buckets: Vector) -> Vector:
    """Linear within the bucket, as Prometheus has it."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        rest = frozenset((key, value) for key, value in labels if key != "le")
        groups.setdefault(rest, []).append((bound, count))
    return {labels: _quantile(quantile, sorted(points)) for labels, points in groups.items()}


def _quantile(quantile: float, points: list[tuple[float, float]]) -> float:
    total = points[-1][1]
    if not total or points[-1][0] != math.inf:
        return math.nan
    wanted, low, below = quantile * total, 0.0, 0.0
    for bound, count in points:
        if count >= wanted:
            if bound == math.inf:
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return math.nan
