"""Each Triton kernel against its twin, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).with_name("interpreted")
FILES = frozenset(path.name for path in FOLDER.glob("test_*.py"))
GRAPHS = frozenset({"test_step_graphs.py", "test_rank_graphs.py", "test_adapter_graphs.py"})
FOREIGN = frozenset({"test_recorded_states.py"})
ENGINES = frozenset({"test_whole_engine.py", "test_batch_invariant_engine.py"})
GROUPS = frozenset({"test_window_slots.py", "test_device_states.py"})
ATTENTION = frozenset({"test_paged_attention.py", "test_latent_attention.py"})
KV = frozenset({"test_kv_pack.py", "test_kv_pack_summed.py"})


# Minutes of computing: on a busy machine more than others may take.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(GRAPHS, marks=pytest.mark.long, id="recorded steps"),
        pytest.param(FOREIGN, marks=pytest.mark.long, id="recorded steps of transformers' code"),
        pytest.param(ENGINES, marks=pytest.mark.long, id="engines"),
        pytest.param(GROUPS, marks=pytest.mark.long, id="windows and states"),
        pytest.param(ATTENTION, marks=pytest.mark.long, id="attention"),
        pytest.param(KV, id="KV"),
        pytest.param(
            FILES - GRAPHS - FOREIGN - ENGINES - GROUPS - ATTENTION - KV,
            marks=pytest.mark.long,
            id="other kernels",
        ),
    ],
)
def test_interpreted(names: frozenset[str]) -> None:
    """A process runs many files: its imports take longer than most of them."""
    files = [FOLDER / name for name in sorted(names)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
