"""`baton serve|gateway|prefill|decode`: start processes from a command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from baton.config import DecodeOptions, GatewayOptions, PrefillOptions, ServeOptions, ServiceOptions
from baton.config.command import option_command, private_environment, to_arguments
from baton.errors import ModelError
from baton.grpc_environment import GRPC_ENVIRONMENT


def serve(options: ServeOptions) -> None:
    """Run the supervisor until it is stopped."""
    from baton.service import run_service
    from baton.supervisor import serve_cluster

    if options.engine != "oracle":
        check_models(options.each_model())
    status = run_service(options, serve_cluster, "serve", announce=lambda _report: None)
    raise SystemExit(status)


def check_models(models: Sequence[ServeOptions]) -> None:
    """Fetch and check checkpoints. Raises ModelError if all are refused; the cluster goes on
    without some, whose workers refuse them likewise."""
    failures = []
    for each in models:
        try:
            check_model(each)
        except ModelError as error:
            failures.append(error)
    if len(failures) == len(models):
        raise failures[0]


def check_model(options: ServeOptions) -> None:
    """Fetch and check the checkpoint once, before the workers do. Raises ModelError.

    Runs in another process, because the command line imports nothing of the engine.
    """
    command = [sys.executable, "-P", "-m", "engine.checkpoint", "--model-impl", options.model_impl]
    if options.revision is not None:
        command += ["--revision", options.revision]
    for name in ("hf_overrides", "rope_scaling"):
        if (value := getattr(options, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    done = subprocess.run([*command, "--", options.model], check=False, stdout=subprocess.PIPE)
    if done.returncode:
        error = json.loads(done.stdout)
        raise ModelError(error["message"], **error["metadata"])


def _becomes(module: str) -> Callable[[ServiceOptions], NoReturn]:
    """Replace this process by `python -m MODULE`: the CLI imports no tier, and signals reach the
    service itself."""

    def run(options: ServiceOptions) -> NoReturn:
        sys.stdout.flush()
        command = [sys.executable, "-P", "-m", module, *to_arguments(options)]
        environment = {**GRPC_ENVIRONMENT, **os.environ, **private_environment(options)}
        os.execve(sys.executable, command, environment)

    return run


serve_command = option_command(
    ServeOptions, serve, "Start all tiers on this machine and keep them running."
)
gateway_command = option_command(GatewayOptions, _becomes("gateway"), "Start the gateway alone.")
prefill_command = option_command(
    PrefillOptions, _becomes("prefill_svc"), "Start one prefill worker."
)
decode_command = option_command(DecodeOptions, _becomes("decode_svc"), "Start one decode worker.")
