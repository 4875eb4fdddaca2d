"""Requirements of all of Baton's processes, checked without torch."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from baton.doctor.finding import Finding, ok, problem, warning
from baton.kv_transports import FALLBACK, REMOTE
from baton.rpc.bind import bind_fault

_MIN_PYTHON = (3, 11)
_PACKAGES = ("grpcio", "protobuf", "pydantic", "tokenizers", "transformers")

#: Maximum bytes of a Unix socket path on Linux, and bytes that a listener appends to the temporary
#: directory.
_MAX_SOCKET_PATH_BYTES = 107
_SOCKET_NAME = "/baton-kv-12345678/kv.sock"

_MIN_OPEN_FILES = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def check_python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < _MIN_PYTHON:
        return problem("python", found, "use Python 3.11 or newer")
    return ok("python", found)


def check_packages() -> Finding:
    """Packages of the gateway; those of workers are checked with the engine."""
    versions: list[str] = []
    missing: list[str] = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        fix = "install them: pip install 'baton-serve[gateway,worker]'"
        return problem("packages", f"missing: {', '.join(missing)}", fix)
    return ok("packages", ", ".join(versions))


def check_address(host: str, port: int) -> Finding:
    fault = bind_fault(host, port)
    if fault is not None:
        return problem("address", f"{host}:{port}", fault.message)
    return ok("address", f"{host}:{port} is free")


def check_shared_memory() -> Finding:
    """Sealed memory shared by two processes, which carries KV within a host."""
    fix = f"give --kv-transport={FALLBACK}, or allow memfd_create in this sandbox"
    try:
        fd = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return warning("shared memory", f"no memfd ({error.strerror})", fix)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mmap.mmap(fd, mmap.PAGESIZE).close()
    except OSError as error:
        return warning("shared memory", f"a memfd cannot be sealed ({error.strerror})", fix)
    finally:
        os.close(fd)
    return ok("shared memory", "memfd with seals")


def check_unix_sockets() -> Finding:
    """Unix sockets, on which decode workers listen for KV from the same host."""
    folder = tempfile.gettempdir()
    fix = f"set TMPDIR to a short path that can be written, or give --kv-transport={FALLBACK}"
    if len(os.fsencode(folder + _SOCKET_NAME)) > _MAX_SOCKET_PATH_BYTES:
        return warning("unix sockets", f"{folder} is too long a path", fix)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="baton-kv-", dir=folder) as place,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
        ):
            sock.bind(f"{place}/kv.sock")
    except OSError as error:
        return warning("unix sockets", f"none in {folder} ({error.strerror})", fix)
    if not _BOOT_ID.is_file():
        return warning("unix sockets", f"{_BOOT_ID} cannot be read", fix)
    return ok("unix sockets", folder)


def check_kv_transports() -> Finding:
    """Available KV transports, judged by their packages; the two checks before cover transports
    within a host."""
    there = [each.name for each in REMOTE if each.is_installed and not each.needs_device]
    on_devices = [each.name for each in REMOTE if each.is_installed and each.needs_device]
    lacking = [f"{each.name}: {each.install}" for each in REMOTE if not each.is_installed]
    found = ", ".join(there)
    if on_devices:
        found += f"; with KV on GPUs {', '.join(on_devices)}"
    if lacking:
        found += f"; not installed: {', '.join(lacking)}"
    return ok("kv transports", found)


def check_open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return warning("open files", f"at most {soft}", f"raise it: ulimit -n {_MIN_OPEN_FILES}")
    return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def check_clock() -> Finding:
    """The wall clock, which log lines, traces and the registry show; deadlines use the monotonic
    clock."""
    resolution_s = time.get_clock_info("monotonic").resolution
    if resolution_s > 1e-3:
        fix = "deadlines will be coarse: choose another clock source"
        return warning("clock", f"monotonic clock of {resolution_s * 1e3:.0f} ms", fix)
    installed_s = Path(__file__).stat().st_mtime
    if time.time() < installed_s - 86400:
        fix = "set the clock: log lines and traces of several hosts will not fit together"
        return warning("clock", "the wall clock is before Baton's installation", fix)
    return ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def check_registry(url: str, timeout_s: float = 3.0) -> Finding:
    """Whether Redis answers. `url` may contain a password and is never printed."""
    try:
        import redis
    except ImportError:
        return problem("registry", "no redis package", "pip install redis, or leave --registry out")
    try:
        with redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        ) as client:
            began_s = time.monotonic()
            client.ping()
            took_ms = (time.monotonic() - began_s) * 1e3
    except (redis.RedisError, ValueError) as error:
        fix = "start Redis there, or mend the URL (redis://host:port/db)"
        return problem("registry", f"no answer ({type(error).__name__})", fix)
    return ok("registry", f"Redis answers in {took_ms:.1f} ms")
