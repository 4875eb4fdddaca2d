"""Every command block of README.md and docs/ runs, from the root of the repository, or says why it
does not."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client, Completion
from baton.errors import BatonError
from tests.support.doc_blocks import MARKS, SERVER, Block, blocks_of, commands_of
from tests.support.doc_services import BIN, ROOT, on_one_host, started
from tests.support.metrics_page import free_ports
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page, ROOT)]

#: The address that the documents name, and the environment that they assume.
ADDRESS = "127.0.0.1:50051"
VENV_BIN = ".venv/bin/"

#: `make` finds its environment ready, and installs nothing.
MAKEFLAGS = f"RUNS= STAMP= BIN={BIN}"

#: Environment of lines that serve, where the line is the matter: processes start in a third of the
#: time. The model itself is served to all other blocks, and to the first request of the README.
WITHOUT_MODEL = {"BATON_ENGINE": "oracle"}

#: `docker compose [--profile NAME]... up|run ...`: the profiles must be there, and the service that
#: `run` names.
DRY_DOCKER = """
import subprocess, sys

assert sys.argv.pop(1) == "compose", sys.argv
profiles = []
while sys.argv[1] == "--profile":
    profiles += sys.argv[1:3]
    del sys.argv[1:3]
verb, rest = sys.argv[1], sys.argv[2:]
known = {"up": {"--build", "--detach", "--wait"}, "run": {"--rm"}}[verb]
options = [word for word in rest if word.startswith("--")] if verb == "up" else rest[:1]
assert set(options) <= known, rest
command = ["docker-compose", *profiles, "config", "--services"]
services = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
assert services
assert verb == "up" or rest[1] in services, (rest, services)
"""

#: Programs that run a text given as the last argument.
INTERPRETERS = {"python": (sys.executable, "-c"), "js": ("node", "-e")}

#: What a block may need besides, how to see whether it is here, and how to have it.
TOOLS = {
    "grpcurl": (("grpcurl", "-version"), "github.com/fullstorydev/grpcurl"),
    "Node.js": (
        ("node", "-e", 'require("@grpc/grpc-js"); require("@grpc/proto-loader")'),
        "npm install @grpc/grpc-js @grpc/proto-loader, and NODE_PATH if it is elsewhere",
    ),
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def blocks(kind: str, told: str = "") -> pytest.MarkDecorator:
    """Those with such a mark; "" for those without one."""
    chosen = [block for block in BLOCKS if block.kind == kind and told in block.told]
    assert chosen, f"no block is marked {kind!r} {told!r}"
    return pytest.mark.parametrize("block", [param_of(block) for block in chosen])


def param_of(block: Block) -> Any:
    """Blocks with processes of their own are tried in every run if they are the README's, and do
    not serve; else by .ci/run."""
    is_long = block.kind == "serves" or (not block.kind and block.page != "README.md")
    return pytest.param(block, id=block.name, marks=[pytest.mark.long] if is_long else [])


def run_block(block: Block, run: Run, address: str) -> None:
    """Run it with this interpreter's environment for .venv, and `address` for the documents'
    one."""
    text = block.text.replace(VENV_BIN, f"{BIN}/").replace(ADDRESS, address)
    if block.language in INTERPRETERS:
        done = run([*INTERPRETERS[block.language], text])
        assert done.returncode == 0, done.stdout
        return
    if block.language != "console":
        run_shell(text, run, **shell_environment(address))
        return
    for (command, _), (_, shown) in zip(
        commands_of(Block(block.page, 0, "", text)), commands_of(block), strict=True
    ):
        done = run(["bash", "-euo", "pipefail", "-c", command], **shell_environment(address))
        assert (done.returncode, done.stdout) == (0, shown)


def run_shell(text: str, run: Run, **env: str) -> None:
    done = run(["bash", "-euo", "pipefail", "-c", text], **env)
    assert done.returncode == 0, done.stdout


def shell_environment(address: str) -> dict[str, str]:
    """Where the commands find the server; `make` finds its environment ready, and installs
    nothing."""
    return {"BATON_ADDRESS": address, "MAKEFLAGS": MAKEFLAGS}


def test_the_marks_are_ones_that_we_know() -> None:
    for block in BLOCKS:
        texts = MARKS[block.kind] if block.kind else {""}
        assert texts is None or block.told in texts, block.name
        assert block.kind != "not run" or len(block.told.split()) >= 3, block.name


def test_there_are_blocks_of_each_kind() -> None:
    """A reader of pages that saw none would pass all the rest."""
    pages = {block.page for block in BLOCKS}
    assert {"README.md", "docs/operating.md", "docs/sdk.md", "docs/tuning.md"} <= pages
    assert {block.language for block in BLOCKS} >= {"bash", "python", "console"}


@blocks("")
def test_a_block_runs(block: Block, run: Run) -> None:
    run_block(block, run, ADDRESS)


@blocks("needs")
def test_a_block_runs_beside_a_server(block: Block, run: Run, address: str) -> None:
    tool = block.told.removeprefix(SERVER).removeprefix(" and ")
    if tool:
        probe, remedy = TOOLS[tool]
        if shutil.which(probe[0]) is None or run([*probe]).returncode:
            pytest.skip(f"{block.name} needs {tool}: {remedy}")
    run_block(block, run, address)


def test_the_first_request_of_the_readme_is_handed_over(first_answer: Completion) -> None:
    """What it says about two tiers is seen at once: nothing has been learned yet."""
    assert first_answer.timing.transfer_bytes > 0
    assert first_answer.timing.prefill_worker != first_answer.timing.decode_worker


@pytest.mark.long
@blocks("runs with")
def test_a_block_runs_with_less_to_do(block: Block, run: Run, tmp_path: Path) -> None:
    """The mark gives options that take the place of the block's own; {tmp} is a folder that goes
    away."""
    (line,) = block.lines
    run_shell(f"{line.replace(VENV_BIN, f'{BIN}/')} {block.told.format(tmp=tmp_path)}", run)


@blocks("serves", "each line by itself")
def test_a_line_serves_until_it_is_stopped(block: Block) -> None:
    # MAKELEVEL: as if typed by hand, also where `make test` runs this.
    make = {"MAKEFLAGS": MAKEFLAGS, "MAKELEVEL": "0", "ARGS": ""}
    for line in block.lines:
        with started(line, BATON_PORT="0", **WITHOUT_MODEL, **make) as service:
            told = service.ready_line()
            with Client(told.removeprefix("Baton is ready at ").split(": ")[0]) as client:
                check_answer(client)


@blocks("serves", "all lines together")
async def test_lines_serve_together_until_they_are_stopped(block: Block) -> None:
    """Each line of the page would be on a host of its own; here all are on one."""
    front, prefill, decode = map(str, free_ports(3))
    async with redis_server() as redis:
        places = {"50061": prefill, "50062": decode, "redis://redis:6379/0": redis.url}
        with ExitStack() as stack:
            services = []
            for line in block.lines:
                port = {"BATON_PORT": front} if line.startswith("baton gateway") else {}
                service = started(on_one_host(line, places), **WITHOUT_MODEL, **port)
                services.append(stack.enter_context(service))
            client = stack.enter_context(Client(f"127.0.0.1:{front}"))
            async with asyncio.timeout(60):
                while num_ready(client) < len(services) - 1:
                    for one in services:
                        one.check()
                    await asyncio.sleep(0.1)
            check_answer(client)


def check_answer(client: Client) -> None:
    answer = client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    assert len(answer.token_ids) == 4


def num_ready(client: Client) -> int:
    """Workers that the gateway knows to be ready; 0 while there is no gateway yet."""
    try:
        return sum(worker.state == "ready" for worker in client.model(timeout_s=5.0).workers)
    except BatonError:
        return 0


@blocks("dry run")
def test_a_block_for_containers_is_one_that_compose_understands(
    block: Block, run: Run, tmp_path: Path
) -> None:
    """Run with a `docker` that starts nothing, but has docker-compose read the file with the
    profiles asked for."""
    if shutil.which("docker-compose") is None:
        pytest.skip("no docker-compose here (Debian: apt-get install docker-compose)")
    if block.text.startswith("helm ") and shutil.which("helm") is None:
        pytest.skip("no helm here (make test-chart fetches it)")
    docker = tmp_path / "docker"
    docker.write_text(f"#!{sys.executable}\n{DRY_DOCKER}")
    docker.chmod(0o755)
    run_shell(f'export PATH="{tmp_path}:$PATH"\n{block.text}', run)


@blocks("not run")
def test_a_block_that_is_not_run_says_why(block: Block) -> None:
    """Listed among the skipped tests."""
    pytest.skip(f"{block.name}: {block.told}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_prose_is_wrapped(run: Run) -> None:
    done = run([sys.executable, "scripts/wrap.py", "--check"])
    assert done.returncode == 0, done.stdout


def test_generated_pages_are_current(run: Run) -> None:
    done = run([sys.executable, "scripts/docs.py", "--check"])
    assert done.returncode == 0, done.stdout
