"""`baton profile-memory`: where a model's memory goes, in pictures."""

from __future__ import annotations

import subprocess
import sys

from baton.config.command import option_command, to_arguments
from baton.config.profile_options import ProfileOptions


def profile_memory(options: ProfileOptions) -> None:
    """Run in another process, to keep torch out of this one."""
    command = [sys.executable, "-P", "-m", "engine.memory_profile", *to_arguments(options)]
    raise SystemExit(subprocess.run(command, check=False).returncode)


profile_memory_command = option_command(
    ProfileOptions, profile_memory, "Record where memory goes, and draw it."
)
