"""The examples of clusters that set ``TF_CONFIG``: Ray's trainer and Spark's distributor, each with two processes.

Kubeflow's ``TF_CONFIG`` is that of ``test_open.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ROOT, environment

pytestmark = pytest.mark.slow

LIMIT = 240.0


@pytest.mark.parametrize(
    "cluster, module", [("ray", "ray.train"), ("spark", "spark_tensorflow_distributor")]
)
def test_two_workers_end_with_equal_weights(cluster: str, module: str, tmp_path: Path) -> None:
    pytest.importorskip(module, reason=f"needs {cluster}: see docs/clusters.md")
    script = ROOT / "examples" / cluster / "train.py"
    done = subprocess.run(
        [sys.executable, str(script), "--workers", "2"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-6000:], sep="\n")
    assert done.returncode == 0
    assert "; ranks [0, 1]; equal weights: True" in done.stdout
