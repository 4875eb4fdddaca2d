"""Measure all tables of docs/performance.md, and rewrite them.

    python -m bench.suite [--only NAME ...] [--resume] [--trace FILE] [--quick] [--render]

Each section is a separate program that writes its result to bench/results; the page is updated
after each, so that results survive the failure of a later section. --resume skips sections with a
result of this commit. --render measures nothing. --quick tries everything in a minute, in
build/bench-quick, and changes no result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_kernels.cpu.library import level
from bench.machine import describe_commit, write_json
from bench.suite.markdown import NOT_MEASURED, replaced
from bench.suite.sections import SECTIONS, Section, tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "bench" / "results"
QUICK = ROOT / "build" / "bench-quick"

#: Time limit of a section, in seconds. The longest, that of peers, takes an hour on two idle cores.
_LIMIT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Places:
    """results: a folder with a JSON file for each section. page: the document that holds the
    tables."""

    results: Path
    page: Path

    def result(self, section: Section) -> Path:
        """Path of this machine's result."""
        name = f"{section.name}-{level()}" if section.is_per_level else section.name
        return self.results / f"{name}.json"

    def read(self, section: Section) -> dict[str, Any] | None:
        """Data that the section's tables are rendered from; None if nothing was measured."""
        if section.is_per_level:
            paths = sorted(self.results.glob(f"{section.name}-*.json"), reverse=True)
            return {"machines": [json.loads(path.read_text()) for path in paths]} if paths else None
        path = self.result(section)
        return json.loads(path.read_text()) if path.exists() else None


def rendered(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with all generated parts updated from results. Raises PageError if a part is missing
    in it."""
    for name, (section, render) in tables().items():
        body = render(results[section]) if section in results else NOT_MEASURED
        page = replaced(page, name, body)
    return page


def read_results(places: Places) -> dict[str, dict[str, Any]]:
    """Available results by section."""
    results = {section.name: places.read(section) for section in SECTIONS}
    return {name: result for name, result in results.items() if result is not None}


def write_page(places: Places) -> None:
    """Render all available results."""
    text = rendered(places.page.read_text(encoding="utf-8"), read_results(places))
    places.page.write_text(text, encoding="utf-8")


def measure(section: Section, places: Places, trace: str | None, is_quick: bool) -> bool:
    """Run one section; returns whether it wrote a new result, which it does last. The result
    includes the machine's load beforehand."""
    path = places.result(section)
    load_before = list(os.getloadavg())
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    command = [sys.executable, *section.command(str(shown), trace, is_quick)]
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        return False
    write_json(path, {**json.loads(path.read_text()), "load_average_before": load_before})
    return True


def run(
    sections: Sequence[Section], places: Places, trace: str | None, is_quick: bool
) -> list[str]:
    """Measure the sections in order; returns the names of failed ones."""
    failed = []
    for number, section in enumerate(sections, 1):
        _report(f"[{number}/{len(sections)}] {section.name}")
        begin_s = time.monotonic()
        is_done = measure(section, places, trace, is_quick)
        outcome = "done" if is_done else "FAILED: its table keeps the last result"
        _report(
            f"[{number}/{len(sections)}] {section.name}: {outcome}, "
            f"{time.monotonic() - begin_s:.0f} s"
        )
        if not is_done:
            failed.append(section.name)
        write_page(places)
    return failed


def is_of_commit(path: Path, commit: str) -> bool:
    """Whether a result is from this commit."""
    return path.exists() and json.loads(path.read_text()).get("git", {}).get("commit") == commit


def is_chosen(section: str, only: str) -> bool:
    """Sections are chosen by prefix: `engine` includes `engine-levels`, `split` all splits."""
    return section == only or section.startswith(f"{only}-")


def quick_places() -> Places:
    """An empty folder, with a copy of the page."""
    shutil.rmtree(QUICK, ignore_errors=True)
    QUICK.mkdir(parents=True)
    return Places(QUICK, Path(shutil.copy(PAGE, QUICK)))


def _report(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()


def main() -> int:
    """Returns the number of failed sections."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--trace", help="Recorded lengths for the long prompts; see bench.split.")
    given = parser.parse_args()
    places = quick_places() if given.quick else Places(RESULTS, PAGE)
    if given.render:
        write_page(places)
        return 0
    commit = str(describe_commit().get("commit", ""))
    chosen = [
        section
        for section in SECTIONS
        if any(is_chosen(section.name, only) for only in given.only)
        and not (given.resume and is_of_commit(places.result(section), commit))
    ]
    trace = str(Path(given.trace).resolve()) if given.trace else None
    failed = run(chosen, places, trace, given.quick)
    if failed:
        _report(f"failed: {', '.join(failed)}; once more with --only, or --resume")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
