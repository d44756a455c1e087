"""What a start costs: seconds from the command to the end of the first step, and the memory of a rank."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import cores
from benchmarks.cases import START
from benchmarks.process_set import clean_environment
from benchmarks.results import CaseResult, RoundResult, Timing

_SCRIPT = """
import resource, sys, time
if sys.argv[1] == "npurun":
    import npu_device as npu
    npu.open(seed=1).as_default()
import numpy as np, tensorflow as tf
keras = tf.keras
model = keras.Sequential([keras.Input([784]), keras.layers.Dense(512, "relu"), keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
if sys.argv[1] == "npurun":
    model = npu.distribute.replicate(model)
model.fit(np.zeros([256, 784], "float32"), np.zeros([256], "int32"), batch_size=256, verbose=0)
print("first step", time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
"""
_SECONDS = 300


def measure(ranks: int, repeats: int, directory: Path) -> CaseResult:
    """Start a small training without the package, as many processes at a time, and with npurun, in turn."""
    directory.mkdir(parents=True, exist_ok=True)
    script = str(directory / "first_step.py")
    Path(script).write_text(_SCRIPT)
    kinds = {
        "TensorFlow alone": [[sys.executable, script, "alone"]] * ranks,
        "npurun": [[sys.executable, "-m", "npu_device.launch", "-n", str(ranks), script, "npurun"]],
    }
    seconds = RoundResult(
        f"start to first step, {ranks} processes, s", 0, 1, [Timing(kind) for kind in kinds]
    )
    memory = RoundResult("memory of a process, MB", 0, 1, [Timing(kind) for kind in kinds])
    before = cores.measure()
    for _ in range(repeats):
        for place, commands in enumerate(kinds.values()):
            began = time.time()
            found = _run(commands)
            if isinstance(found, str):
                seconds.timings[place].error = memory.timings[place].error = found
                continue
            seconds.timings[place].seconds.append(max(end for end, _ in found) - began)
            memory.timings[place].seconds.append(statistics.mean(size for _, size in found))
    after = cores.measure()
    state = before.state if before.state == after.state else cores.CHANGED
    return CaseResult(START, "start", ranks, [seconds, memory], state, before.nanoseconds)


def _run(commands: list[list[str]]) -> list[tuple[float, float]] | str:
    """Return when the first step of each process was over, and its memory; or what went wrong."""
    environment = {**clean_environment(), "CUDA_VISIBLE_DEVICES": "-1"}
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(each, env=environment, stdout=pipe, stderr=pipe, text=True)
        for each in commands
    ]
    ends = [process.communicate(timeout=_SECONDS) for process in started]
    lines = [
        line.split() for output, _ in ends for line in output.splitlines() if "first step" in line
    ]
    if any(process.returncode for process in started) or not lines:
        return ends[0][1][-300:]
    return [(float(words[-2]), float(words[-1])) for words in lines]
