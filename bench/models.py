"""Supported decoders, by Baton's own code and by transformers', according to a test run.

python -m bench.models: runs tests/engine/families/test_families.py and
tests/engine/transformers/test_architectures.py completely, and writes a table of each into
docs/models.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from bench.suite.markdown import replaced
from engine.families.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"


@dataclass(frozen=True, slots=True)
class Table:
    """The part `name` of the page, from the test module `tests`.

    title: heading of the first column. columns: heading by test name, or by a property that a test
    records.
    """

    name: str
    tests: str
    title: str
    columns: Mapping[str, str]


NATIVE = Table(
    "families",
    "tests/engine/families/test_families.py",
    "model",
    {
        "test_greedy_tokens_are_those_of_generate": "whole prompts",
        "test_chunks_change_nothing": "chunks",
        "test_logits_after_a_handoff_are_the_same": "handoff",
        "test_drafts_change_nothing": "drafts",
        "test_quantised_tokens_are_those_of_what_the_levels_mean": "int8, int4",
        "test_published_tokens_are_those_of_what_the_levels_mean": "GPTQ, AWQ, packed, fp8",
        "test_logits_are_the_same_to_the_bit_in_any_batch": "bits",
        "test_ranks_give_the_same_bits": "ranks",
        "kernels": "kernels",
    },
)
GENERIC = Table(
    "transformers",
    "tests/engine/transformers/test_architectures.py",
    "architecture",
    {
        "test_greedy_tokens_are_those_of_generate": "whole prompts",
        "test_chunks_change_nothing": "chunks",
        "test_a_handoff_changes_nothing": "handoff",
        "test_drafts_change_nothing": "drafts",
        "test_gptq_tokens_are_those_of_what_the_levels_mean": "GPTQ",
        "test_float8_tokens_are_those_of_what_the_codes_mean": "fp8",
        "test_logits_are_the_same_to_the_bit_in_any_batch": "bits",
        "default": "by default",
        "kernels": "kernels",
    },
)
#: All cases, because an omitted one would count as skipped; in a report format with recorded
#: properties.
PYTEST = ("pytest", "-q", "-n0", "--long", "-o", "junit_family=xunit1")
#: The test that determines the table's rows, whether it passes or fails.
FIRST = "test_greedy_tokens_are_those_of_generate"
#: Parameters in a test's name other than the architecture.
_PARAMETERS = re.compile(
    r"^(float32|bfloat16)-|-(float32|bfloat16|int8|int4|gptq|awq|compressed-tensors|fp8)$"
)
_WORDS = {"skipped": "to rounding", "failure": "**no**", "error": "**no**"}


def results_of(report: str) -> dict[str, dict[str, str]]:
    """By architecture, then test: "yes" or the failure, and recorded properties. With further test
    parameters, the worst result. report: JUnit XML of pytest."""
    results: dict[str, dict[str, str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        test, _, rest = case.attrib["name"].removesuffix("]").partition("[")
        name = _PARAMETERS.sub("", rest)
        words = [_WORDS[child.tag] for child in case if child.tag in _WORDS]
        found = results.setdefault(name, {})
        if words or test not in found:
            found[test] = words[0] if words else "yes"
        for noted in case.iter("property"):
            found[noted.attrib["name"]] = noted.attrib["value"]
    return results


def table_of(table: Table, results: Mapping[str, Mapping[str, str]]) -> str:
    """Markdown, one line per architecture."""
    heads = (table.title, *table.columns.values())
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in sorted(results.items()):
        default = "Baton's code" if name in FAMILIES else "transformers'"
        known = {"default": default, **found}
        cells = (name, *(known.get(test, "-") for test in table.columns))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    status = 0
    for table in (NATIVE, GENERIC):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", *PYTEST, table.tests, f"--junitxml={report}"]
            status |= subprocess.run(command, cwd=ROOT, check=False).returncode
            results = results_of(report.read_text())
        results = {name: found for name, found in results.items() if FIRST in found}
        head = f"{len(results)} {table.title}s, transformers {version('transformers')}, float32:"
        body = f"{head}\n\n{table_of(table, results)}"
        PAGE.write_text(replaced(PAGE.read_text(), table.name, body))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
