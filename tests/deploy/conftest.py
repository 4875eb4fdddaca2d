"""The folder's own notion of what a process of the container's image is started with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def image_environment() -> dict[str, str]:
    """What the image itself sets: a path on which `baton` is found, and nothing of this user's."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
