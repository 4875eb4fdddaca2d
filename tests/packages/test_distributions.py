"""Two distributions fill one package `baton`: the server's and the client's, which runs by itself
wherever grpcio does."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import baton
from tests.support.fake_inference import FakeInThread

ROOT = Path(__file__).resolve().parents[2]
SERVER, CLIENT = ROOT, ROOT / "client"
FOLDERS = (
    *("baton", "gateway", "prefill_svc", "decode_svc"),
    *("worker_core", "kv_transfer", "engine", "distill"),
)
SUFFIXES = frozenset({".py", ".pyi", ".typed"})

#: Runs with the wheel's files before anything else, as if on Windows and with nothing installed
#: that was not asked for.
PROGRAM = """
import sys

wheel, others, address = sys.argv[1:]
sys.path[:0] = [wheel]
sys.path.append(others)
import asyncio, ssl, uuid
import grpc, grpc.aio, grpc_health.v1.health_pb2_grpc
from google.rpc import error_details_pb2, status_pb2

ABSENT = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
WANTED = sys.stdlib_module_names - ABSENT | {"baton", "google", "grpc", "grpc_health"}

class OnlyWanted:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in WANTED:
            raise ModuleNotFoundError(name)

for name in ABSENT:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, OnlyWanted())
sys.platform = "win32"

import baton
from baton.client import AsyncClient, BatonError, Client, NoWorkers

sys.platform = "linux"
assert baton.__file__.startswith(wheel), baton.__file__
with Client(address) as client:
    assert client.health()
    assert client.generate([1, 2, 3]).token_ids == (1, 2, 3)
    with client.stream("ab") as stream:
        assert "".join(chunk.text for chunk in stream) == "ab"

async def ask():
    async with AsyncClient(address) as client:
        return (await client.generate([4, 5])).token_ids

assert asyncio.run(ask()) == (4, 5)
try:
    with Client("127.0.0.1:9", max_retries=0) as nowhere:
        nowhere.generate("ab")
except NoWorkers as error:
    assert isinstance(error, BatonError)
"""


def project(root: Path) -> dict[str, object]:
    data: dict[str, object] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return data


def shipped(root: Path) -> list[str]:
    """Paths in the wheel, without its metadata."""
    files = WheelBuilder(str(root)).recurse_included_files()
    return [file.distribution_path for file in files]


def test_each_source_is_in_one_distribution() -> None:
    sources = [
        path.relative_to(top).as_posix()
        for top, folders in ((ROOT, FOLDERS), (ROOT / "kernels", ("baton_kernels",)))
        for folder in folders
        for path in (top / folder).rglob("*")
        if path.suffix in SUFFIXES
    ]
    together = [*shipped(SERVER), *shipped(CLIENT)]
    assert sorted(path for path in together if Path(path).suffix in SUFFIXES) == sorted(sources)


def test_only_the_server_puts_more_than_baton_into_site_packages() -> None:
    assert {path.partition("/")[0] for path in shipped(CLIENT)} == {"baton"}


def test_the_server_asks_for_the_client_of_its_own_version() -> None:
    assert f"{project(CLIENT)['name']}=={baton.__version__}" in project(SERVER)["dependencies"]


def test_both_have_one_licence() -> None:
    assert (CLIENT / "LICENSE").read_bytes() == (SERVER / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's, built and unpacked."""
    folder = tmp_path_factory.mktemp("client")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=CLIENT, check=True, capture_output=True)
    (archive,) = folder.glob("*.whl")
    assert archive.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(archive).extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.slow
def test_the_client_needs_nothing_but_what_it_asks_for(wheel: Path) -> None:
    # -I -S: neither this folder nor an editable installation of the checkout is found.
    python = [sys.executable, "-I", "-S", "-c", PROGRAM]
    with FakeInThread() as service:
        done = subprocess.run(
            [*python, str(wheel), sysconfig.get_path("purelib"), service.address],
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_client_is_typed(wheel: Path) -> None:
    assert (wheel / "baton" / "py.typed").is_file()
    assert (wheel / "baton" / "v1" / "inference_pb2.pyi").is_file()
