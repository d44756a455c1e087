"""``python -m benchmarks --gpu``: training steps on GPUs that differ only in how the ranks communicate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.cases import on_gpus
from benchmarks.measuring import Patience, run_case
from benchmarks.table import one_step, setup

_FACTS = """
import tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU") if gpus else "GPU"
print("found:", len(gpus), "x", name, "CUDA", tf.sysconfig.get_build_info().get("cuda_version"))
"""
_NO_GPU = 2


def measure(ranks: int | None, repeats: int, quick: bool, on_cpu: bool, output: Path) -> None:
    """Measure, print the table and write ``results.json``. Exits with code 2 if TensorFlow sees no GPU.

    Args:
        ranks: number of ranks; default: one per GPU, at least 2.
        repeats: how often each rival is timed.
        quick: one step a repetition.
        on_cpu: run the same sides on CPUs with a smaller model, to check them.
        output: directory.
    """
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        gpus = ranks = ranks or 2
    else:
        command = [sys.executable, "-c", _FACTS]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout
        found = found.rsplit("found: ", 1)[1].strip()
        gpus = int(found.split()[0])
        if not gpus:
            print(
                "python -m benchmarks --gpu: TensorFlow sees no GPU, and nothing was measured.\n"
                'What to do: nvidia-smi lists the GPUs of this machine; pip install -e ".[gpu,benchmarks]" installs '
                "CUDA's libraries. --on-cpu runs the same sides on CPUs, to check them.",
                file=sys.stderr,
            )
            sys.exit(_NO_GPU)
        print(f"GPUs: {found}", file=sys.stderr)
    ranks = ranks or max(2, gpus)
    run = results.begin()
    model, device = ("resnet50", "CPU") if on_cpu else ("resnet50_224", "GPU")
    case = on_gpus(quick, ranks, model, gpus, device)
    run.cases += run_case(case, ranks, Patience(repeats, 0.0), output / "logs")
    run.write(output / "results_gpu.json")
    print(setup(run), *map(one_step, run.cases), sep="\n\n")
    if on_cpu:
        print("These steps ran on CPUs: the table only shows that the sides work.")
    if any(
        timing.error
        for one in run.cases
        for one_round in one.rounds
        for timing in one_round.timings
    ):
        sys.exit(1)
