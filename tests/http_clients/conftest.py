"""`baton serve` with the bundled model, for programs that know nothing of Baton."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.oracle_model import CHAT_TEMPLATE

HERE = Path(__file__).parent
BUNDLED = HERE.parents[1] / "models" / "baton-py-6m"
MODEL = "bundled"

#: Runs a program of one of the environments: its name, and arguments.
Run = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("model")
    for path in BUNDLED.iterdir():
        if path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def base_url(model: Path) -> Iterator[str]:
    """Address of the HTTP API, without /v1."""
    command = [sys.executable, "-m", "baton", "serve", str(model), "--served-model-name", MODEL]
    # The template could show thoughts, of which this model has none that end.
    options = ["--port=0", "--http-port=0", "--kv-cache-memory-bytes=64MiB", "--log-level=error"]
    options += ["--reasoning-parser=none"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        output = ""
        for line in process.stdout or ():
            output += line
            found = re.search(r"curl (http://[^/]+)/v1", line)
            if found:
                yield found[1]
                process.send_signal(signal.SIGINT)
                assert process.wait() == 0
                return
    pytest.fail(output)


def runner(name: str, hub: Path | None = None) -> Run:
    """What runs programs of .venv-NAME; skips where it is not there. hub: a cache of Hugging
    Face's."""
    programs = HERE / f".venv-{name}" / "bin"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    if hub is not None:
        environment["HF_HOME"] = str(hub)
    if not (programs.parent / "installed.txt").exists():
        pytest.skip(f"{programs.parent.name} is not there: run tests/http_clients/setup.sh")

    def run(program: str, *arguments: object) -> str:
        """Its output. Fails with it unless it ends with 0."""
        done = subprocess.run(
            [programs / program, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    return run
