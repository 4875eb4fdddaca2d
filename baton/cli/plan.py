"""`baton plan`: memory, degrees, times and tiers of a model on given devices."""

from __future__ import annotations

import subprocess
import sys

from baton.config.command import option_command, to_arguments
from baton.config.plan_options import PlanOptions


def plan(options: PlanOptions) -> None:
    """Run in another process, to keep torch out of this one."""
    command = [sys.executable, "-P", "-m", "engine.plan", *to_arguments(options)]
    raise SystemExit(subprocess.run(command, check=False).returncode)


plan_command = option_command(
    PlanOptions, plan, "Plan memory, degrees, times and tiers of a model on devices."
)
