"""`python -m engine.plan`: run by `baton plan` in a process of its own, so that the command line
does not import torch."""

from __future__ import annotations

import json

import typer

from baton.config.command import option_command
from baton.config.plan_options import PlanOptions
from baton.errors import StartupError
from baton.service import refuse


def run(options: PlanOptions) -> None:
    """Plan, draw and print."""
    from engine.plan.devices import THIS_CPU, find_device
    from engine.plan.plan import Planner, find_or_measure
    from engine.plan.report import as_json, print_plan
    from engine.plan.source import read_model

    is_cpu = options.gpu == THIS_CPU
    kind, has_float8 = ("cpu", False) if is_cpu else ("cuda", find_device(options.gpu).has_float8)
    model = read_model(options, kind, has_float8=has_float8)
    plan = Planner(options, model, find_or_measure(options, model.sizes)).plan()
    if options.picture is not None:
        from engine.plan.picture import draw

        draw(plan, options.picture)
    if options.is_json:
        typer.echo(json.dumps(as_json(plan)))
    else:
        print_plan(plan)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("plan")(option_command(PlanOptions, run, "Plan a model on devices."))
    try:
        app(prog_name="baton plan")
    except StartupError as error:
        raise SystemExit(refuse("plan", error)) from None
