"""A suite of tests that others wrote, run unmodified against Baton: its outcomes, and why some
tests fail. docs/openai.md has both."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).parent

#: Outcome of each test: passed, failed or skipped.
Outcomes = Mapping[str, str]

DECISION, MISSING, MODEL = "decision", "missing", "model"


class Reason(NamedTuple):
    """pattern: of the tests. kind: DECISION, Baton does otherwise on purpose; MISSING, Baton has it
    not; MODEL, the model that is served is not the one that the test was written for. why: for the
    page."""

    pattern: str
    kind: str
    why: str


@dataclass(frozen=True)
class Suite:
    """name: of its folder, without _suite. about: for the page. run: runs some tests, or all.
    not_run: for the page, which tests of the same project are left out, and why."""

    name: str
    title: str
    about: str
    run: Callable[[Sequence[str]], Outcomes]
    reasons: Sequence[Reason] = ()
    not_run: str = ""

    @property
    def outcomes_file(self) -> Path:
        return HERE / f"{self.name}_suite" / "outcomes.json"

    def outcomes(self) -> Outcomes:
        """Those of the last run; empty if there was none."""
        path = self.outcomes_file
        return json.loads(path.read_text()) if path.is_file() else {}

    def reason_of(self, test: str) -> Reason | None:
        """The first that names the test."""
        return next((each for each in self.reasons if re.search(each.pattern, test)), None)

    def unexplained(self, outcomes: Outcomes) -> Sequence[str]:
        """The tests that failed without a reason."""
        failed = (test for test, outcome in outcomes.items() if outcome == "failed")
        return [test for test in failed if self.reason_of(test) is None]


def run_pytest(
    venv: str, folder: Path, arguments: Sequence[str | Path], environment: Mapping[str, str]
) -> Outcomes:
    """Run pytest of .venv-VENV in a folder, without the settings and the conftest.py of Baton's own
    tests, which lie above it."""
    report = Path(environment["REPORT"])
    options = ("-c", os.devnull, f"--rootdir={folder}", f"--confcutdir={folder}")
    options += ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    subprocess.run(
        [HERE / f".venv-{venv}" / "bin" / "python", "-m", "pytest", *options, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
    )
    return {
        f"{(case.get('classname') or '').replace('.', '/')}::{case.get('name')}": _outcome(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if "skipped" in kinds:
        return "skipped"
    return "failed" if kinds & {"failure", "error"} else "passed"
