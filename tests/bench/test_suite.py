"""`make bench`: every table of the page has a section that makes it, sections do not harm each
other, and nothing else changes."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.suite import __main__ as suite
from bench.suite.__main__ import (
    PAGE,
    QUICK,
    RESULTS,
    Places,
    is_of_commit,
    measure,
    read_results,
    rendered,
    run,
    write_page,
)
from bench.suite.markdown import PageError, names_in, part_of, replaced
from bench.suite.sections import SECTIONS, Section, tables

TEXT = st.text(alphabet="ab |\n-", max_size=30)


def page_of(parts: Mapping[str, str]) -> str:
    return "# Page\n" + "".join(
        f"text {name}\n<!-- begin: {name} -->\n{body}\n<!-- end -->\n"
        for name, body in parts.items()
    )


@pytest.mark.slow
@given(TEXT, TEXT, TEXT)
def test_one_part_is_replaced_and_all_else_stays(first: str, second: str, news: str) -> None:
    page = page_of({"one": first, "two": second})
    changed = replaced(page, "one", news)
    assert part_of(changed, "one").strip() == news.strip()
    assert part_of(changed, "two") == part_of(page, "two")
    assert replaced(changed, "one", first.strip()) == replaced(page, "one", first)
    assert names_in(changed) == ["one", "two"]


def test_backslashes_of_a_body_stay_as_they_are() -> None:
    assert part_of(replaced(page_of({"one": ""}), "one", r"\1 \n"), "one") == "\\1 \\n\n"


@pytest.mark.parametrize("page", ["# No marks", page_of({"one": ""}) * 2])
def test_a_part_must_be_there_once(page: str) -> None:
    with pytest.raises(PageError, match="'one'"):
        replaced(page, "one", "")


def test_every_table_of_the_page_is_made_by_a_section_and_every_section_has_its_place() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(names_in(page)) == sorted(tables())
    for name in tables():
        page = replaced(page, name, "")
    assert [line for line in page.splitlines() if line.startswith("|")] == []


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page, read_results(Places(RESULTS, PAGE))) == page


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_the_programs_know_the_options_that_they_are_given(
    section: Section, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those before a trace. A program that is asked for help measures nothing."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [section.module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(section.module, run_name="__main__", alter_sys=True)
    told = capsys.readouterr().out
    assert not ended.value.code
    for is_quick in (False, True):
        command = section.command("out.json", "some.csv" if section.trace else None, is_quick)
        options = {part for part in command if part.startswith("--")}
        assert {option for option in options if option not in told} == set()


def fake(name: str, *arguments: str) -> Section:
    return Section(name, "tests.support.fake_bench", arguments, ("--tell", "quick"), {})


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A page with every part, and no results."""
    page = tmp_path / "page.md"
    page.write_text(page_of(dict.fromkeys(tables(), "old")))
    return Places(tmp_path, page)


def test_a_section_that_fails_keeps_its_last_result_and_stops_no_other(places: Places) -> None:
    places.result(fake("first")).write_text('{"told": "before"}')
    sections = [fake("first", "--fail"), fake("second", "--tell", "new")]
    assert run(sections, places, None, is_quick=False) == ["first"]
    assert json.loads(places.result(fake("first")).read_text()) == {"told": "before"}
    second = json.loads(places.result(fake("second")).read_text())
    assert second["told"] == "new"
    assert len(second["load_average_before"]) == 3


def test_machines_of_other_cpu_levels_keep_their_results(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = replace(fake("levels", "--tell", "new"), is_per_level=True)
    for level, tells in (("avx512", "older"), ("avx2", "old")):
        (places.results / f"levels-{level}.json").write_text(json.dumps({"told": tells}))
    monkeypatch.setattr(suite, "level", lambda: "avx2")
    assert run([section], places, None, is_quick=False) == []
    read = places.read(section)
    assert read is not None
    assert [machine["told"] for machine in read["machines"]] == ["older", "new"]


def test_a_quick_run_takes_the_quick_arguments(places: Places) -> None:
    assert measure(fake("one", "--fail"), places, None, is_quick=True)
    assert json.loads(places.result(fake("one")).read_text())["told"] == "quick"


def test_what_is_not_measured_says_so(places: Places) -> None:
    write_page(places)
    page = places.page.read_text()
    assert all("make bench" in part_of(page, name) for name in tables())


@pytest.mark.parametrize(
    ("result", "is_done"),
    [
        (None, False),
        ({}, False),
        ({"git": {"commit": "b"}}, False),
        ({"git": {"commit": "a"}}, True),
    ],
)
def test_a_result_of_this_commit_needs_no_other(
    result: dict[str, Any] | None, is_done: bool, tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    if result is not None:
        path.write_text(json.dumps(result))
    assert is_of_commit(path, "a") is is_done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "row"),
    [
        ("ahead", "| 4 | 1.00 |"),
        # All levels of the machine, each in a process of its own.
        pytest.param("engine", "| tiny | bfloat16 | 1 | 20 |", marks=pytest.mark.long),
    ],
)
def test_a_quick_run_measures_and_writes_a_page_of_its_own(section: str, row: str) -> None:
    before = PAGE.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "bench.suite", "--quick", "--only", section]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    places = Places(QUICK, QUICK / PAGE.name)
    assert row in part_of(places.page.read_text(), section)
    assert PAGE.read_text(encoding="utf-8") == before
