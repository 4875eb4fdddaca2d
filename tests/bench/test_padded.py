"""A padded model says what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.types import Sampling
from bench.padded import pad
from tests.support.engines import generate, token_ids
from tests.support.tiny_models import make_tiny_model
from tests.transformers_backend.conftest import load
