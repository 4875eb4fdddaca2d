"""The commands reach a secured server by flags, or by the variables that its own process has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from typer.testing import CliRunner, Result

from baton.cli.main import app
from baton.rpc.tls import TlsFiles
from baton.supervisor.serving import wait_until_serving
from tests.support.certificates import Authority, as_options
from tests.support.live_tiers import decode_worker, gateway

KEY = "sk-one-4711"


async def run(environment: Mapping[str, str], *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)


def as_flags(files: TlsFiles) -> list[str]:
    return [f"--{name.replace('_', '-')}={path}" for name, path in as_options(files).items()]


def as_variables(files: TlsFiles) -> dict[str, str]:
    return {f"BATON_{name.upper()}": path for name, path in as_options(files).items()}


@pytest.mark.slow
async def test_commands_show_certificate_and_key(own: TlsFiles, authority: Authority) -> None:
    files = as_options(own)
    async with (
        decode_worker(worker_id="d0", **files) as decode,
        gateway([], [decode], api_key=(KEY, "another"), **files) as front,
    ):
        await wait_until_serving(front, tls=own)
        at = {"BATON_ADDRESS": front}
        variables = {**at, **as_variables(own), "BATON_API_KEY": f"{KEY},another"}
        flags = [*as_flags(own), f"--api-key={KEY}"]
        assert (await run(at, "health", *as_flags(own))).exit_code == 0
        assert (await run({"BATON_ADDRESS": decode}, "health", *as_flags(own))).exit_code == 0
        assert (await run(at, "health")).exit_code == 1
        assert (await run(at, "health", f"--ssl-ca-certs={authority.ca_certs}")).exit_code == 1
        blocks = await run(at, "status", "--blocks", *flags)
        assert blocks.exit_code == 0, blocks.output
        assert "d0" in blocks.output
        told = await run(variables, "generate", "--max-tokens=2", "hello")
        assert told.exit_code == 0, told.output
        refused = await run(at, "generate", "--api-key=sk-none", *as_flags(own), "hello")
        assert refused.exit_code == 1
        assert "UNAUTHENTICATED" in refused.output
        assert "sk-none" not in refused.output


async def test_a_file_that_is_not_there_is_a_mistake_of_the_command_line() -> None:
    told = await run({}, "health", "--ssl-ca-certs=no-such.pem")
    assert told.exit_code == 2
    assert "--ssl-ca-certs=no-such.pem" in told.output
