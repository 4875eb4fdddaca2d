"""A container engine for `make test-images`: the one that is here, or one that is started for the
test; and base images.

Where no image registry is reached, stand-ins for the base images are made of this machine's own
Debian: its Python and its Redis, with the package sources, certificates and pip configuration that
work here. They are named as stand-ins.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("docker.io", "docker-compose", "debootstrap")
_START_TIMEOUT_S = 60.0
_STAND_IN = "stand-in"
#: What Debian's Python needs to be what a slim image of Python is: a venv module, pip, and the
#: headers of its C API.
_PYTHON_PACKAGES = ("python3", "python3-venv", "python3-pip", "libpython3-dev", "ca-certificates")
_PIP_FILES = (
    Path("/etc/pip.conf"),
    Path.home() / ".config/pip/pip.conf",
    Path.home() / ".pip/pip.conf",
)


class NoEngine(Exception):
    """There is no engine, and none can be started; says why, and what would help."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers. compose: the program, as it is called. environment: with which both
    programs find it."""

    compose: tuple[str, ...]
    environment: dict[str, str]

    def docker(
        self, *arguments: str, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `run`, of the client."""
        return run("docker", *arguments, environment=self.environment, check=check, stdin=stdin)


def run(
    *command: str,
    environment: dict[str, str] | None = None,
    check: bool = True,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run to the end with both outputs captured, as one. Raises CalledProcessError, with what was
    said, if `check`."""
    done = subprocess.run(
        command,
        env=environment,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command[:4], done.stdout)
    return done


@contextlib.contextmanager
def running_engine(state: Path, *, may_install: bool) -> Iterator[Engine]:
    """The engine that the environment names; else one with its state below `state`, stopped at the
    end.

    state: a short path, for a socket lies in it; images are kept there. Raises NoEngine.
    """
    if may_install:
        _install()
    if shutil.which("docker") is None:
        raise NoEngine(_advice("docker is not installed"))
    environment = _client_environment()
    if run("docker", "info", environment=environment, check=False).returncode == 0:
        yield Engine(_compose(environment), environment)
        return
    if shutil.which("dockerd") is None:
        raise NoEngine(_advice("no engine answers, and dockerd is not installed"))
    if os.geteuid() != 0:
        raise NoEngine(
            "no engine answers, and only root can start one: start Docker, or set DOCKER_HOST"
        )
    with _daemon(state) as socket:
        environment["DOCKER_HOST"] = socket
        yield Engine(_compose(environment), environment)


def find_base(engine: Engine, image: str, state: Path) -> str:
    """`image`, if it is here or can be pulled; else the name of a stand-in for it."""
    if engine.docker("image", "inspect", image, check=False).returncode == 0:
        return image
    if engine.docker("pull", image, check=False).returncode == 0:
        return image
    kind = image.partition(":")[0]
    stand_in = f"baton-{_STAND_IN}/{kind}"
    if engine.docker("image", "inspect", stand_in, check=False).returncode:
        {"python": _make_python, "redis": _make_redis}[kind](engine, stand_in, state)
    return stand_in


def is_stand_in(image: str) -> bool:
    """Whether find_base made it."""
    return f"-{_STAND_IN}/" in image


def _advice(what: str) -> str:
    packages = " ".join(_PACKAGES)
    return f"{what} (Debian, Ubuntu: apt-get install {packages}, or as root ARGS=--install)"


def _install() -> None:
    missing = [
        package
        for package, program in zip(
            _PACKAGES, ("dockerd", "docker-compose", "debootstrap"), strict=True
        )
        if shutil.which(program) is None
    ]
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "--yes", "-qq", "--no-install-recommends", *missing)


def _client_environment() -> dict[str, str]:
    """The classic builder works everywhere; BuildKit only where its plugin is, and is taken
    there."""
    environment = dict(os.environ)
    has_buildx = run("docker", "buildx", "version", environment=environment, check=False)
    environment["DOCKER_BUILDKIT"] = "1" if has_buildx.returncode == 0 else "0"
    return environment


def _compose(environment: dict[str, str]) -> tuple[str, ...]:
    if run("docker", "compose", "version", environment=environment, check=False).returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    raise NoEngine(_advice("an engine answers, but there is no docker-compose"))


@contextlib.contextmanager
def _daemon(state: Path) -> Iterator[str]:
    state.mkdir(parents=True, exist_ok=True)
    socket = f"unix://{state}/docker.sock"
    command = ["dockerd", "--data-root", f"{state}/data", "--exec-root", f"{state}/exec"]
    command += ["--pidfile", f"{state}/pid", "--host", socket]
    log = state / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            environment = {**os.environ, "DOCKER_HOST": socket}
            deadline = time.monotonic() + _START_TIMEOUT_S
            while run("docker", "info", environment=environment, check=False).returncode:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text().splitlines()[-1:]
                    raise NoEngine(
                        f"dockerd does not start here: {' '.join(said) or 'it says nothing'}"
                    )
                time.sleep(0.2)
            yield socket
        finally:
            process.terminate()


def _make_python(engine: Engine, name: str, state: Path) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise NoEngine(
            _advice("no image registry is reached, and a base image takes root and debootstrap")
        )
    root = state / "python"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    packages = ",".join(_PYTHON_PACKAGES)
    run("debootstrap", "--variant=minbase", f"--include={packages}", release, str(root), _mirror())
    (root / "usr/bin/python").symlink_to("python3")
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    _take_over_network_settings(root)
    changes = [
        f"--change=ENV {name}={value}" for name, value in sorted(_network_variables().items())
    ]
    archive = state / "python.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".")
    engine.docker("import", *changes, str(archive), name)
    archive.unlink()
    shutil.rmtree(root)


def _make_redis(engine: Engine, name: str, state: Path) -> None:
    base = find_base(engine, "python:any", state)
    install = "apt-get install --yes -qq --no-install-recommends redis-server"
    recipe = f"FROM {base}\nRUN apt-get update -qq && {install}\n"
    engine.docker("build", "--quiet", "--network=host", f"--tag={name}", "-", stdin=recipe)


def _mirror() -> str:
    """Where this machine's Debian comes from: of deb822 files and of the older lists."""
    files = [*Path("/etc/apt/sources.list.d").glob("*"), Path("/etc/apt/sources.list")]
    for path in sorted(filter(Path.is_file, files), key=lambda path: path.name != "debian.sources"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] in ("URIs:", "deb") and "debian" in line:
                return next(word for word in words if "://" in word)
    raise NoEngine("no source of Debian packages in /etc/apt: no base image can be made")


def _take_over_network_settings(root: Path) -> None:
    """What lets apt and pip reach their indices from within: sources, certificates, wheels of this
    machine."""
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    for path in Path("/etc/apt/sources.list.d").glob("debian*"):
        shutil.copy(path, root / "etc/apt/sources.list.d")
    certificates = Path("etc/ssl/certs/ca-certificates.crt")
    if (Path("/") / certificates).is_file():
        shutil.copy(Path("/") / certificates, root / certificates)
    for file in filter(Path.is_file, _PIP_FILES):
        shutil.copy(file, root / "etc/pip.conf")
    for folder in _wheel_folders():
        shutil.copytree(folder, root / folder.relative_to("/"), dirs_exist_ok=True)


def _network_variables() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(("PIP_", "SSL_CERT_", "REQUESTS_CA"))]
    return {name: os.environ[name] for name in names}


def _wheel_folders() -> Sequence[Path]:
    """Folders of this machine that pip looks for wheels in."""
    urls = os.environ.get("PIP_FIND_LINKS", "").split()
    for file in filter(Path.is_file, _PIP_FILES):
        config = configparser.ConfigParser()
        config.read(file)
        urls += config.get("global", "find-links", fallback="").split()
    return [path for path in dict.fromkeys(map(Path, urls)) if path.is_absolute() and path.is_dir()]
