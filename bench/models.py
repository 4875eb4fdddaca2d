"""Which decoders run by transformers' code, as a test run finds it.

python -m bench.models: runs tests/transformers_backend/test_architectures.py, all of it, and writes
its table into docs/models.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import transformers

from baton.model.config import FAMILIES
from bench.suite.markdown import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
TESTS = "tests/transformers_backend/test_architectures.py"
#: A column's heading by the test that fills it.
COLUMNS: Mapping[str, str] = {
    "test_greedy_tokens_are_those_of_generate": "whole prompts",
    "test_chunks_change_nothing": "chunks",
    "test_a_handoff_changes_nothing": "handoff",
    "test_drafts_change_nothing": "drafts",
    "test_logits_are_the_same_to_the_bit_in_any_batch": "bits",
}
_WORDS = {"skipped": "to rounding", "failure": "**no**", "error": "**no**"}


def results_of(report: str) -> dict[str, dict[str, str]]:
    """By architecture, then test, "yes" or what kept it from that. report: pytest's JUnit XML, our
    own."""
    results: dict[str, dict[str, str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        test, _, name = case.attrib["name"].removesuffix("]").partition("[")
        words = [_WORDS[child.tag] for child in case if child.tag in _WORDS]
        results.setdefault(name, {})[test] = words[0] if words else "yes"
    return results


def table_of(results: Mapping[str, Mapping[str, str]]) -> str:
    """In Markdown, a line for each architecture."""
    heads = ("architecture", *COLUMNS.values(), "by default")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in sorted(results.items()):
        default = "Baton's code" if name in FAMILIES else "transformers'"
        cells = (name, *(found.get(test, "-") for test in COLUMNS), default)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", TESTS, f"--junitxml={report}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        results = results_of(report.read_text())
    head = f"{len(results)} architectures, transformers {transformers.__version__}, float32:"
    body = f"{head}\n\n{table_of(results)}"
    PAGE.write_text(replaced(PAGE.read_text(), "transformers", body))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
