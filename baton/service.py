"""The life of one process of Baton around its service: options, logging, signals, readiness, exit
status.

A service is one coroutine function, `serve(options, stop, on_ready)`: it starts, calls on_ready
once when it can take work, serves until `stop` is set, drains within options.drain_timeout_s, and
returns. It raises StartupError if it cannot start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import uvloop

from baton.config import ServiceOptions
from baton.config.load import as_told
from baton.errors import ConfigError, StartupError
from baton.grpc_environment import quiet_grpc
from baton.logs import configure_logging
from baton.rpc.tls import check_files
from baton.start_log import StartLogHandler
from baton.types import NO_LEVEL, UNKNOWN_NUMERICS, NumericsClass

logger = logging.getLogger(__name__)

#: Exit status of a process that cannot start as it was asked to.
EXIT_REFUSED = 2

#: Time, in seconds, that a process has to stop by itself after its supervisor vanished.
ORPHAN_GRACE_S = 10.0

#: Time, in seconds, for a cancelled service to give back what outlives a process.
_CLEAN_UP_S = 2.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """A service takes work. address: host:port it listens on; empty for a node of a worker that
    listens elsewhere. phases: seconds of each step of the
    start, in order.
    numerics, dtype_reason: of a worker. http_address: of a gateway's HTTP; empty if it has none.
    sampling_defaults: the model's own, for people; of a gateway."""

    address: str
    phases: Mapping[str, float]
    numerics: NumericsClass = UNKNOWN_NUMERICS
    dtype_reason: str = ""
    http_address: str = ""
    sampling_defaults: str = ""

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports that it has bound, by option."""
        bound = {"port": self.address, "http-port": self.http_address}
        return {name: int(text.rpartition(":")[2]) for name, text in bound.items() if text}

    @property
    def computing(self) -> str:
        """In which type, why, and on what: "bfloat16 (the checkpoint's type) on cpu avx512"; empty
        if not known."""
        numerics = self.numerics
        if not self.dtype_reason:
            return ""
        level = "no native kernels: slow" if numerics.level == NO_LEVEL else numerics.level
        return f"{numerics.dtype} ({self.dtype_reason}) on {numerics.device} {level}".rstrip()


OnReady = Callable[[ReadyReport], None]

_Options_contra = TypeVar("_Options_contra", bound=ServiceOptions, contravariant=True)
_Options = TypeVar("_Options", bound=ServiceOptions)


class Serve(Protocol[_Options_contra]):
    """A service; see the module's docstring."""

    def __call__(
        self, options: _Options_contra, stop: asyncio.Event, on_ready: OnReady, /
    ) -> Awaitable[None]: ...


def log_ready(report: ReadyReport) -> None:
    """Log that the service takes work."""
    computing = report.computing or str(report.numerics)
    after = f"; {computing}" if computing else ""
    if report.sampling_defaults:
        after += f"; sampling defaults of the model: {report.sampling_defaults}"
    where = " and ".join(filter(None, (report.address, report.http_address)))
    at = f" at {where}" if where else ""
    logger.info("ready%s (%s)%s", at, describe_phases(report.phases), after)


def run_service(
    options: _Options, serve: Serve[_Options], name: str, announce: OnReady = log_ready
) -> int:
    """Run `serve` until SIGTERM, SIGINT, or the end of file of options.parent_fd; return the exit
    status.

    A second signal ends the process at once. A StartupError gives exit status 2 and one line, on
    options.ready_fd if given, for the parent to show, else on stderr. name: of the process in its
    log and messages. announce: reports that the service is ready.
    """
    occupy_standard_streams()
    quiet_grpc()
    configure_logging(options.log_level, name)
    try:
        check_descriptors(options)
        check_files(options.tls)
    except StartupError as error:
        return refuse(name, error)
    ready = _ReadyPipe(options.ready_fd)
    start_log = StartLogHandler(ready.write)
    if options.ready_fd is not None:
        start_log.attach()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(options, serve, ready, announce))
    except StartupError as error:
        if options.ready_fd is None:
            return refuse(name, error)
        model = {name: error.metadata[name] for name in ("model",) if name in error.metadata}
        ready.write({"error": as_told(error), "reason": error.reason, **model})
        return EXIT_REFUSED
    except asyncio.CancelledError:
        return 1
    finally:
        start_log.detach()
        ready.close()
    return 0


def refuse(name: str, error: StartupError) -> int:
    """Print in one line why a process does not start; return its exit status."""
    sys.stderr.write(f"baton {name}: error: {as_told(error)}\n")
    return EXIT_REFUSED


def occupy_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed. A connection would get their
    numbers, and libuv never closes those: its client would wait for the end for ever."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def check_descriptors(options: ServiceOptions) -> None:
    """Raises ConfigError if a file descriptor that the options name is not open."""
    for option, fd in (("ready_fd", options.ready_fd), ("parent_fd", options.parent_fd)):
        if fd is None:
            continue
        try:
            os.fstat(fd)
        except OSError as error:
            fix = f"{error.strerror}; leave it out, or pass the descriptor on to this process"
            raise ConfigError.of(option, fd, fix) from error


def main(
    cls: type[_Options], serve: Serve[_Options], name: str, arguments: Sequence[str] | None = None
) -> NoReturn:
    """The body of `python -m PACKAGE`: parse the command line into `cls`, run `serve`, and exit."""
    import typer

    from baton.config.command import option_command

    def run(options: _Options) -> None:
        label = getattr(options, "worker_id", None) or name
        raise SystemExit(run_service(options, serve, label))

    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(name)(option_command(cls, run, (serve.__doc__ or "").strip()))
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name=f"baton {name}")
    except StartupError as error:
        raise SystemExit(refuse(name, error)) from None
    raise SystemExit(0)


async def _run(
    options: _Options, serve: Serve[_Options], ready: _ReadyPipe, announce: OnReady
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(signum: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("%s again: stopping at once", signum.name)
            os._exit(128 + signum)
        logger.info("%s: finishing what runs; once more stops at once", signum.name)
        stop.set()

    def on_ready(report: ReadyReport) -> None:
        # What was loaded stays: a collection, which stops every thread, is to look at what requests
        # left only.
        gc.collect()
        gc.freeze()
        announce(report)
        line: dict[str, object] = {"address": report.address, "phases": dict(report.phases)}
        if report.http_address:
            line["http_address"] = report.http_address
        if report.sampling_defaults:
            line["sampling_defaults"] = report.sampling_defaults
        if report.numerics != UNKNOWN_NUMERICS:
            line["numerics"] = dataclasses.asdict(report.numerics)
            line["dtype_reason"] = report.dtype_reason
        ready.write(line)

    for signum in _SIGNALS:
        loop.add_signal_handler(signum, on_signal, signum)
    ended = threading.Event()
    service = asyncio.ensure_future(serve(options, stop, on_ready))
    if options.parent_fd is not None:
        _watch_parent(options.parent_fd, loop, stop, service.cancel, ended)
    try:
        await service
    finally:
        # Libraries look at the end of the process for what nobody has collected, and print it.
        gc.unfreeze()
        ended.set()
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)


def describe_phases(phases: Mapping[str, float]) -> str:
    """The phases of a start as people read them: "load 1.2 s, listen 0.0 s"."""
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items())


def _watch_parent(
    parent_fd: int,
    loop: asyncio.AbstractEventLoop,
    stop: asyncio.Event,
    cancel: Callable[[], object],
    ended: threading.Event,
) -> None:
    """Set `stop` when the supervisor's end of the pipe closes, cancel the service if it does not
    stop in time, or was stopping already, and end the process if that does not help.

    It is a thread so that a loop that is busy, loading a model say, is watched too.
    """

    def watch() -> None:
        while os.read(parent_fd, 1):
            pass
        if ended.is_set():
            return
        logger.warning("the supervisor is gone: stopping")
        # Then the supervisor was told to stop at once.
        is_stopping = stop.is_set()
        loop.call_soon_threadsafe(stop.set)
        if is_stopping or not ended.wait(ORPHAN_GRACE_S):
            loop.call_soon_threadsafe(cancel)
            if not ended.wait(_CLEAN_UP_S):
                os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class _ReadyPipe:
    """Owns options.ready_fd: takes a line of each phase and choice of the start, then one of its
    end, and is closed."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def write(self, line: Mapping[str, object]) -> None:
        """Write the line; nothing happens after the last one, or if nobody reads."""
        if self._fd is None:
            return
        data = json.dumps(line).encode() + b"\n"
        try:
            os.write(self._fd, data)
        except BrokenPipeError:
            logger.info("nobody waits for the ready line")
            self.close()
        if "address" in line or "error" in line:
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
