"""Every command block of README.md and docs/ runs, from the root of the repository, or says why it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.doc_blocks import SERVER, Block, blocks_of, commands_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page, ROOT)]

#: The address that the documents name, and the environment that they assume.
ADDRESS = "127.0.0.1:50051"
VENV_BIN = ".venv/bin/"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_block(block: Block, run: Run, address: str) -> None:
    """Run it with this interpreter's environment for .venv, and `address` for the documents' one."""
    bin_folder = f"{Path(sys.executable).parent}/"
    text = block.text.replace(VENV_BIN, bin_folder).replace(ADDRESS, address)
    if block.language == "python":
        done = run([sys.executable, "-c", text])
        assert done.returncode == 0, done.stdout
        return
    if block.language != "console":
        done = run(["bash", "-euo", "pipefail", "-c", text], **shell_environment(address))
        assert done.returncode == 0, done.stdout
        return
    for (command, _), (_, shown) in zip(
        commands_of(Block(block.page, 0, "", text, "", "")), commands_of(block), strict=True
    ):
        done = run(["bash", "-euo", "pipefail", "-c", command], **shell_environment(address))
        assert (done.returncode, done.stdout) == (0, shown)


def shell_environment(address: str) -> dict[str, str]:
    """Where the commands find the server; `make` finds its environment ready, and installs nothing."""
    make = f"STAMP= BIN={Path(sys.executable).parent}"
    return {"BATON_ADDRESS": address, "MAKEFLAGS": make}


def test_the_marks_are_ones_that_we_know() -> None:
    assert {block.needs for block in BLOCKS} <= {"", SERVER}


def test_there_are_blocks_of_each_kind() -> None:
    """A reader of pages that saw none would pass all the rest."""
    pages = {block.page for block in BLOCKS}
    assert {"README.md", "docs/operating.md", "docs/sdk.md", "docs/tuning.md"} <= pages
    assert {block.language for block in BLOCKS} >= {"bash", "python", "console"}


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if not b.needs and not b.excuse], ids=lambda block: block.name
)
def test_a_block_runs(block: Block, run: Run) -> None:
    run_block(block, run, ADDRESS)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.needs == SERVER], ids=lambda block: block.name
)
def test_a_block_runs_beside_a_server(block: Block, run: Run, address: str) -> None:
    run_block(block, run, address)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.excuse], ids=lambda block: block.name)
def test_a_block_that_is_not_run_says_why(block: Block) -> None:
    """Listed among the skipped tests."""
    assert len(block.excuse.split()) >= 3
    pytest.skip(f"{block.name}: {block.excuse}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_generated_pages_are_current(run: Run) -> None:
    done = run([sys.executable, "scripts/docs.py", "--check"])
    assert done.returncode == 0, done.stdout
