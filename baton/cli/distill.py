"""`baton distill`: trains a draft model for speculative decoding on a target's output."""

from __future__ import annotations

import subprocess
import sys

from baton.config.command import option_command, to_arguments
from baton.config.distill_options import DistillOptions


def distill(options: DistillOptions) -> None:
    """Run in another process, to keep torch out of this one."""
    command = [sys.executable, "-P", "-m", "distill", *to_arguments(options)]
    raise SystemExit(subprocess.run(command, check=False).returncode)


distill_command = option_command(
    DistillOptions, distill, "Train a small model to draft for a target (--speculative-model)."
)
