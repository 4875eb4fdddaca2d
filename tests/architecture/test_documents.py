"""What the documents say about the tree is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATH = re.compile(r"`([a-z_]+(?:/[\w.-]+)+/?)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    paths = [ROOT / found for found in PATH.findall(text) if (ROOT / found.split("/")[0]).is_dir()]
    links = [document.parent / found for found in LINK.findall(text)]
    missing = [str(path) for path in (*paths, *links) if not path.exists()]
    assert not missing


def test_the_architecture_names_a_file_for_every_step_of_a_request() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = (
        "gateway",
        "prefill_svc",
        "decode_svc",
        "worker_core",
        "engine",
        "kv_transfer",
        "baton",
        "kernels",
    )
    for folder in folders:
        assert f"`{folder}/" in text


def test_where_to_add_something_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Where do I add...\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in section.splitlines() if line.startswith("| a ")]
    named = {row[0].strip("| "): PATH.findall(row[1]) for row in rows}
    for what in ("sampling option", "server option", "model family", "scheduling policy", "metric"):
        assert len(named[f"a {what}"]) > 2
    assert "baton/kv_transports.py" in named["a transport of KV"]
    assert not [path for paths in named.values() for path in paths if not (ROOT / path).exists()]


def test_every_module_of_baton_has_its_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## The rooms of baton/\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z0-9_]+(?:\.py)?)`", section))
    folders = {path.parent.name for path in (ROOT / "baton").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "baton").glob("[!_]*.py")}
    assert named == folders | modules
