"""Open-loop load over Baton's gRPC: latency and throughput against rate. See bench/README.md.

python -m bench.load --compare --rate 2 --rate 4 --rate 8 --ttft-slo-ms 500
    --tpot-slo-ms 50 --plot load.png
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
import yaml

from baton.client import DEFAULT_ADDRESS
from baton.config import ServeOptions
from baton.errors import BatonError
from baton.supervisor import ChildFailed
from bench.drive import (
    Session,
    cluster_options,
    measure,
    started,
)
from bench.machine import BUNDLED_MODEL, document_of, now, publish
from bench.measure import Slo
from bench.plan import Arrivals, ArrivalsError, LoadOptions
from bench.report import Point, data_of, goodput_lines, points_table
from engine.plan.trace import TraceError


def settings_of(pairs: Sequence[str]) -> dict[str, object]:
    """Parse NAME=VALUE options of `baton serve`, with values in YAML. Raises BadParameter."""
    settings: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r}: give NAME=VALUE, e.g. dtype=float32")
        settings[name.replace("-", "_")] = yaml.safe_load(value)
    return settings


def main(
    model: Annotated[
        str, typer.Argument(help="Model that clusters are started with.", metavar="[MODEL]")
    ] = BUNDLED_MODEL,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help=f"Gateway that runs already, e.g. {DEFAULT_ADDRESS}"
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure split and colocated, taking turns.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of `baton serve` for clusters."),
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests/s; may be repeated. A trace has its own.")
    ] = None,
    arrivals: Annotated[
        Arrivals | None, typer.Option(help="[default: trace if there is one, else poisson]")
    ] = None,
    burst_size: Annotated[int, typer.Option(min=1, help="Requests that come at once.")] = 8,
    trace: Annotated[
        Path | None, typer.Option(help="File of lengths and times, .csv or .jsonl.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each run.")] = 100,
    input_tokens: Annotated[int, typer.Option(min=1, help="Mean length of prompts.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean length of answers.")] = 64,
    length_spread: Annotated[
        float, typer.Option(min=0, max=1, help="Lengths are uniform in mean * (1 +- spread).")
    ] = 0.5,
    input_scale: Annotated[float, typer.Option(help="Factor on lengths of prompts.")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Factor on lengths of answers.")] = 1.0,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Cut requests to this; the model's length if not given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses lengths, tokens and arrivals.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each rate.")] = 1,
    ttft_slo_ms: Annotated[float | None, typer.Option(help="Longest time to first token.")] = None,
    tpot_slo_ms: Annotated[float | None, typer.Option(help="Longest time per later token.")] = None,
    slo_attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests inside both, for goodput.")
    ] = 0.9,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results.")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Write latency against rate as a PNG.")
    ] = None,
) -> None:
    """Send requests at given rates, open loop, and measure latency and throughput at the client."""
    kind: Arrivals = arrivals or ("trace" if trace else "poisson")
    _refuse(
        compare and address is not None, "--compare starts its own clusters: leave out --address"
    )
    _refuse(address is not None and bool(set_), "--set is for clusters: leave out --address")
    _refuse(kind == "trace" and trace is None, "--arrivals trace: give --trace FILE")
    _refuse(kind != "trace" and not rate, "give --rate, requests/s; it may be repeated")
    _refuse(any(one <= 0 for one in rate or ()), "--rate: give more than 0")
    _refuse(min(input_scale, output_scale) <= 0, "scales of lengths: give more than 0")
    if plot_path and find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'baton-serve[bench]'")
    session = Session(
        LoadOptions(
            arrivals=kind,
            num_requests=num_requests,
            num_input_tokens=input_tokens,
            num_output_tokens=output_tokens,
            length_spread=length_spread,
            burst_size=burst_size,
            trace=trace,
            input_scale=input_scale,
            output_scale=output_scale,
            max_model_len=max_model_len,
            seed=seed,
        ),
        tuple(rate) if rate else (None,),
        repeat,
        Slo(ttft_slo_ms, tpot_slo_ms),
    )
    started_at = now()
    try:
        clusters = {} if address else cluster_options(model, settings_of(set_ or ()), compare)
        points = asyncio.run(_measure(session, clusters, address))
        data = {
            **data_of(points, session.slo, slo_attainment),
            "options": dataclasses.asdict(session),
            "targets": {
                name: options.model_dump(mode="json", exclude_unset=True)
                for name, options in clusters.items()
            },
        }
        document = document_of("bench.load", started_at, data)
        publish(document, json_path, points_table)
    except ChildFailed as error:
        raise SystemExit("\n".join((*error.last_lines, f"load: {error}"))) from None
    except (BatonError, TraceError, ArrivalsError, OSError) as error:
        raise SystemExit(f"load: {error}") from None
    for line in goodput_lines(points, session.slo, slo_attainment):
        typer.echo(line)
    if plot_path:
        from bench.report import plot

        title = f"{address or Path(model).name} {document['git'].get('commit', '')[:12]}"
        plot(points, session.slo, title, plot_path)
    unanswered = [point for point in points if not point.summary.num_complete]
    if unanswered:
        reasons = ", ".join(unanswered[0].summary.errors)
        raise SystemExit(f"load: no request of a run was answered ({reasons})")


async def _measure(
    session: Session, clusters: Mapping[str, ServeOptions], address: str | None
) -> tuple[Point, ...]:
    async with started(clusters, address) as clients:
        return await measure(session, clients)


def _refuse(is_wrong: bool, message: str) -> None:
    if is_wrong:
        raise typer.BadParameter(message)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m bench.load")
