"""What operators do to running processes, each on real ones: what goes on, and what their log says.

Mistakes at the start, as a port that is taken, are in tests/baton/cli/test_start_mistakes.py."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from baton.client import Client, StructuredOutput
from baton.errors import BatonError, EngineFault
from tests.support.certificates import Authority
from tests.support.commands_in_use import ORACLE, address_of, http_url_of, running
from tests.support.live_tiers import BOX_MODEL
from tests.support.metrics_page import free_ports
from tests.support.oracle_model import make_oracle_model
from tests.support.processes import command_of, pids_of
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.long]

#: Adds seconds that a file holds to the clock of the day, and to no other.
SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    static volatile long *shared;
    if (!shared) {
        int fd = open(getenv("SHIFT_FILE"), O_RDONLY | O_CLOEXEC);
        if (fd < 0) return 0;
        shared = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, at);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += shift();
    return status;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return make_oracle_model(tmp_path / "model")


@pytest.fixture
def sockets() -> Iterator[Path]:
    """TMPDIR of a server; short, since socket paths are limited."""
    folder = Path("/tmp") / f"b{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def lines_of(log: Path) -> list[str]:
    """Messages of a log, each one line of JSON; anything else fails."""
    return [json.loads(line)["message"] for line in log.read_text().splitlines()]


def until(is_so: Callable[[], object], seconds: float = 120) -> None:
    deadline_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_one_refused_model_of_two_leaves_the_other(tmp_path: Path) -> None:
    bad = tmp_path / "none"
    shutil.copytree(BOX_MODEL, bad)
    (bad / "config.json").write_text('{"model_type": "mamba"}')
    log = tmp_path / "log"
    command = ["serve", f"bad={bad}", f"good={BOX_MODEL}", "--port=0"]
    with running([*command, "--kv-cache-memory-bytes=16MiB"], log) as process:
        address = address_of(process, log)
        with urllib.request.urlopen(f"{http_url_of(process)}/v1/models") as answer:
            assert [each["id"] for each in json.load(answer)["data"]] == ["good"]
        with Client(address) as client:
            assert client.generate("x", max_tokens=2, model="good").finish_reason
        (line,) = [line for line in lines_of(log) if "without model" in line]
        assert line.startswith("serving without model bad: ")
        assert "model_type='mamba'" in line


def test_a_full_disk_of_the_log_stops_nothing(model: Path) -> None:
    (port,) = free_ports(1)
    command = ["serve", str(model), *ORACLE, f"--port={port}", "--log-level=debug"]
    with (
        open("/dev/full", "w") as full,
        running(command, Path("/dev/full"), full) as process,
        Client(f"127.0.0.1:{port}", max_retries=0) as client,
    ):

        def is_answered() -> bool:
            assert process.poll() is None
            try:
                return client.generate("x", max_tokens=3).usage.completion_tokens == 3
            except BatonError:
                return False

        until(is_answered)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 120)  # Python's, for what it could not flush


def test_a_model_folder_that_is_deleted_leaves_what_runs(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    hidden = tmp_path / "hidden"
    with (
        running(["serve", str(model), *ORACLE, "--port=0"], log) as process,
        Client(address_of(process, log), max_retries=0) as client,
    ):
        model.rename(hidden)
        assert client.generate("x", max_tokens=3).usage.completion_tokens == 3
        output = StructuredOutput(regex="[0-9]{3}")
        with pytest.raises(
            EngineFault, match=r"tokenizer\.json is gone; put the model's files back"
        ):
            client.generate("x", structured_output=output, max_tokens=9)
        until(lambda: any("tokenizer.json is gone" in line for line in lines_of(log)))
        hidden.rename(model)
        assert client.generate("x", structured_output=output, max_tokens=9).text.isdigit()


def test_a_second_sigterm_ends_all_at_once(model: Path, tmp_path: Path, sockets: Path) -> None:
    log = tmp_path / "log"
    command = ["serve", str(model), *ORACLE, "--oracle-step-ms=100", "--port=0"]
    with (
        running(command, log, TMPDIR=str(sockets)) as process,
        Client(address_of(process, log), max_retries=0) as client,
        client.stream("x", max_tokens=3000, ignore_eos=True) as stream,
    ):
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        until(lambda: any("SIGTERM: finishing what runs" in line for line in lines_of(log)))
        process.send_signal(signal.SIGTERM)
        begun_s = time.monotonic()
        assert process.wait(60) == 128 + signal.SIGTERM
        until(lambda: not pids_of(str(model)))
        assert time.monotonic() - begun_s < 8, "their own time for orphans is 10 s"
    assert "SIGTERM again: stopping at once" in lines_of(log)
    assert not list(sockets.glob("baton-*"))


def test_folders_of_kv_sockets_go_with_their_workers(
    model: Path, tmp_path: Path, sockets: Path
) -> None:
    """Also that of a worker which is killed and not started again."""
    log = tmp_path / "log"
    with running(["serve", str(model), *ORACLE, "--port=0"], log, TMPDIR=str(sockets)) as process:
        address_of(process, log)
        assert len(list(sockets.glob("baton-*"))) == 2
        (decode,) = [pid for pid in pids_of(str(model)) if b"decode_svc" in command_of(pid)]
        os.kill(decode, signal.SIGKILL)
        until(lambda: any("decode-0 is back" in line for line in lines_of(log)))
        assert len(list(sockets.glob("baton-*"))) == 2
        (decode,) = [pid for pid in pids_of(str(model)) if b"decode_svc" in command_of(pid)]
        os.kill(decode, signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list(sockets.glob("baton-*"))


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_clock_that_is_set_by_an_hour_changes_nothing(model: Path, tmp_path: Path) -> None:
    source, library, shift = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "shift"
    source.write_text(SHIFTED_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(struct.pack("l", 0))
    log = tmp_path / "log"
    env = {"LD_PRELOAD": str(library), "SHIFT_FILE": str(shift)}
    with (
        shift.open("r+b") as file,
        mmap.mmap(file.fileno(), 8) as shared,
        running(["serve", str(model), *ORACLE, "--port=0"], log, **env) as process,
        Client(address_of(process, log), max_retries=0) as client,
    ):
        url = http_url_of(process)
        right = client.generate("x", max_tokens=300, ignore_eos=True, temperature=0).token_ids
        for seconds in (3600, -3600, 0):
            with client.stream(
                "x", max_tokens=300, ignore_eos=True, temperature=0, timeout_s=60
            ) as stream:
                ids = list(next(iter(stream)).token_ids)
                shared[:8] = struct.pack("l", seconds)
                for chunk in stream:
                    ids += chunk.token_ids
            assert tuple(ids) == tuple(right)
            with urllib.request.urlopen(f"{url}/health") as answer:
                shown = parsedate_to_datetime(answer.headers["date"])
            assert abs((shown - datetime.now(UTC)).total_seconds() - seconds) < 60
            assert client.generate("x", max_tokens=3, timeout_s=30).usage.completion_tokens == 3
        log_lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert not [line for line in log_lines if line["level"] in ("warning", "error")]


@pytest.mark.parametrize("password", ["", ":wrong@"])
async def test_a_wrong_password_of_redis_is_named_with_its_fix(
    model: Path, tmp_path: Path, password: str
) -> None:
    """The gateway waits for it, and finds its workers once the server takes the password."""
    server = RedisServer("--requirepass", "right")
    await server.start()
    try:
        log = tmp_path / "log"
        url = f"redis://{password}127.0.0.1:{server.port}/0"
        command = ["gateway", str(model), "--port=0", f"--registry={url}"]
        with running(command, log) as process:

            def is_said() -> bool:
                assert process.poll() is None
                return any("give the password in --registry" in line for line in lines_of(log))

            await asyncio.to_thread(until, is_said)
            assert "wrong" not in log.read_text().replace("WRONGPASS", "")
    finally:
        await server.stop()


async def test_a_redis_that_is_killed_and_replaced_by_an_empty_one(
    model: Path, tmp_path: Path
) -> None:
    server = RedisServer()
    await server.start()
    try:
        worker, log = tmp_path / "worker", tmp_path / "log"
        (port,) = free_ports(1)
        registry = f"--registry={server.url}"
        decode = ["decode", "oracle", f"--served-model-name={model}", *ORACLE, "--port=0", registry]
        gateway = ["gateway", str(model), f"--port={port}", registry]
        with (
            running(decode, worker),
            running(gateway, log),
            Client(f"127.0.0.1:{port}", max_retries=0) as client,
        ):

            def is_answered() -> bool:
                try:
                    return client.generate("x", max_tokens=3).usage.completion_tokens == 3
                except BatonError:
                    return False

            await asyncio.to_thread(until, is_answered)
            await server.stop()
            outage = "cannot be used, going on without"
            await asyncio.to_thread(until, lambda: any(outage in line for line in lines_of(log)))
            assert await asyncio.to_thread(is_answered)
            await server.start()
            await asyncio.to_thread(
                until, lambda: any("can be used again" in line for line in lines_of(log))
            )
            assert await asyncio.to_thread(is_answered)
            assert sum(outage in line for line in lines_of(log)) == 1
    finally:
        await server.stop()


def test_an_expired_certificate_is_refused_at_the_start_and_not_taken_up(
    model: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    late = authority.files("old.test", not_after=datetime.now(UTC) - timedelta(days=1))
    good = authority.files("localhost")
    log = tmp_path / "log"
    command = ["gateway", str(model), "--port=0", "--decode-workers=127.0.0.1:1"]
    tls = [f"--ssl-certfile={late.certfile}", f"--ssl-keyfile={late.keyfile}"]
    with running([*command, *tls], log) as process:
        assert process.wait(120) == 2
    (line,) = log.read_text().splitlines()
    assert f"--ssl-certfile={late.certfile}: certificate has expired; give one that is" in line
    (port,) = free_ports(1)
    tls = [f"--ssl-certfile={good.certfile}", f"--ssl-keyfile={good.keyfile}"]
    with running([*command, *tls, f"--http-port={port}"], log) as process:
        fetch = ["curl", "-s", "--cacert", str(good.ca_certs), f"https://localhost:{port}/health"]
        until(lambda: subprocess.run(fetch, check=False, capture_output=True).returncode == 0)
        shutil.copy(late.keyfile, good.keyfile)
        shutil.copy(late.certfile, good.certfile)
        assert subprocess.run(fetch, check=False, capture_output=True).returncode == 0
        kept = "certificates are kept as they were: "
        (line,) = [line for line in lines_of(log) if line.startswith(kept)]
        assert line.endswith("certificate has expired; give one that is valid now")
