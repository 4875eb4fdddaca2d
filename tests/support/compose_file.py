"""compose.yaml as this host can run it: each service's command and environment, without containers.

What stands for the container's world is stated in `Localhost`: the network's names become loopback
addresses, ports become free ones, and what is mounted is where it is on the host. Nothing else of a
command or an environment changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PORT = 50051
HTTP_PORT = 8000
#: Ports of services that are not ours, by name.
OTHER_PORTS = {"redis": 6379}

_VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


def load_compose() -> Any:
    """compose.yaml with every variable at its default. Only the form ${NAME:-default} is known."""
    text = (ROOT / "compose.yaml").read_text()
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    plain = _VARIABLE.sub(r"\1", body)
    if "$" in plain:
        raise ValueError("compose.yaml uses a variable without a default")
    return yaml.safe_load(plain)


def services_of(profile: str) -> dict[str, Any]:
    """The services of one profile, by name."""
    services = load_compose()["services"]
    return {name: told for name, told in services.items() if profile in told["profiles"]}


def baton_services_of(profile: str) -> dict[str, Any]:
    """Those of one profile that are processes of Baton: gateway, prefill, decode."""
    return {
        name: told
        for name, told in services_of(profile).items()
        if told["image"].startswith("baton:") and "entrypoint" not in told
    }


def entrypoint() -> list[str]:
    """What the image executes before a service's command."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    parts: list[str] = json.loads(line.removeprefix("ENTRYPOINT"))
    return parts


@dataclass(frozen=True, slots=True)
class Localhost:
    """mounts: host paths by container path. addresses: host:port, on loopback, of services that
    run, by name."""

    mounts: Mapping[str, str]
    addresses: Mapping[str, str]

    def text(self, value: str, own: str = "") -> str:
        """A command's argument, or a variable's value. own: the address of the service itself once
        it has one."""
        for name, address in self.addresses.items():
            port = OTHER_PORTS.get(name, PORT)
            value = re.sub(rf"(?<![\w.-]){name}:{port}\b", address, value)
            for option in ("--kv-host", "--advertise-host"):
                value = value.replace(f"{option}={name}", f"{option}=127.0.0.1")
        if own:
            value = value.replace(f"127.0.0.1:{PORT}", own)
        value = value.replace(f"--port={PORT}", "--port=0")
        value = value.replace(f"--http-port={HTTP_PORT}", "--http-port=0")
        for inside, outside in self.mounts.items():
            if value == inside or value.startswith(inside + "/"):
                value = outside + value[len(inside) :]
        return value

    def command(self, service: Mapping[str, Any]) -> list[str]:
        return [self.text(part) for part in service["command"]]

    def environment(self, service: Mapping[str, Any]) -> dict[str, str]:
        told: Mapping[str, str] = service.get("environment", {})
        return {name: self.text(value) for name, value in told.items()}
