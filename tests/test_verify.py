"""``npurun verify``: each cause, put into a loop on purpose, is named; right scripts are the same."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import job
import numpy as np
import pytest
from combinations import some
from launcher import ROOT, npurun, script

from npu_device._src.comparison import compare
from npu_device._src.verify import causes, file_shadow, report
from npu_device._src.verify.compared_run import ComparedRun
from npu_device._src.verify.plan import LOG, PROBLEM, PlannedProcess
from npu_device._src.verify.verdict import Verdict, judge
from npu_device.launch import verify

DOCS = ROOT / "docs" / "verdicts.md"

LOOP = """
import glob, os
with open("early.txt", "w") as file:
    file.write("written")
import numpy as np, tensorflow as tf, npu_device as npu
npu.open(seed=1).as_default()
rank, size = npu.distribute.rank(), npu.distribute.size()
numbers = np.random.default_rng(0)
x = numbers.normal(size=[48, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)
{model}
model.build([None, 4])
{start}
optimizer = tf.keras.optimizers.{optimizer}
dataset = tf.data.Dataset.from_tensor_slices((x, y))
{data}

{function}
def step(x, y):
    with tf.GradientTape() as tape:
        z = model(x, training=True)
        loss = {loss}
    gradients = tape.gradient(loss, model.trainable_variables)
    {reduce}
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

if not rank:
    open(file="result.txt", mode="w").write("written")
    with tf.io.gfile.GFile(name="more.txt", mode="w") as file:
        file.write("written")
npu.distribute.barrier()  # the ranks share their files
assert open("early.txt").read() == "written"
assert open("result.txt").read() == tf.io.read_file(filename="result.txt").numpy().decode() == "written"
texts = [path.numpy().decode() for path in tf.data.Dataset.list_files("m*.txt").map(tf.io.read_file)]
assert texts == ["written"]
texts = sorted(glob.glob("./*.txt"))
assert texts == sorted(tf.io.gfile.glob("*.txt")) == ["./early.txt", "./more.txt", "./result.txt"]
assert "script.py" in os.listdir() and "script.py" in tf.io.gfile.listdir(".") and len(glob.glob("*.*")) > 2
for x, y in dataset:
    step(x, y)
"""
RIGHT = {
    "function": "",
    "model": "model = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.Dropout(0.5), "
    "tf.keras.layers.Dense(1)])",
    "start": "npu.distribute.broadcast(model.variables)",
    "optimizer": "SGD(0.1)",
    "data": "dataset, batch = npu.distribute.shard_and_rebatch_dataset(dataset, 12)\ndataset = dataset.batch(batch)",
    "loss": "tf.reduce_mean(tf.square(z - y))",
    "reduce": "gradients = npu.distribute.all_reduce(gradients)",
}
PENALTY = """
class Penalty(tf.keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(tf.square(x), axis=1) / 12)
        return x
model = tf.keras.Sequential([tf.keras.layers.Dense(3), Penalty()])
"""
OF_OWN_SEED = "dataset = dataset.shuffle(48, seed=rank + 1)\n"
WRONG: dict[str, dict[str, str]] = {
    "": {"function": "@tf.function"},
    "sum averaged": {"function": "@tf.function", "loss": "tf.reduce_sum(tf.square(z - y))"},
    "global batch size": {
        "loss": "tf.nn.compute_average_loss(tf.square(z - y)[:, 0], global_batch_size=12)"
    },
    "add_loss per sample": {
        "model": PENALTY,
        "loss": "tf.add_n([tf.reduce_sum(loss) for loss in model.losses])",
    },
    "mean summed": {
        "function": "@tf.function",
        "reduce": 'gradients = npu.distribute.all_reduce(gradients, "sum")',
    },
    "discarded result": {
        "function": "@tf.function",
        "reduce": "npu.distribute.all_reduce(gradients)",
    },
    "only the loss is reduced": {"reduce": "loss = npu.distribute.all_reduce(loss)"},
    "not reduced": {"function": "@tf.function", "reduce": "pass"},
    "clipped before the reduction": {
        "reduce": "gradients, _ = tf.clip_by_global_norm(gradients, 0.01)\n    "
        "gradients = npu.distribute.all_reduce(gradients)"
    },
    "normalized alone": {
        "model": "model = tf.keras.Sequential([tf.keras.layers.BatchNormalization(synchronized=True), "
        "tf.keras.layers.Dense(1)])",
        "start": "",
    },
    "different starts": {"start": "model.layers[0].kernel.assign_add(tf.fill([4, 3], 0.1 * rank))"},
    "same samples": {"data": "dataset = dataset.batch(12 // size)"},
    "shuffle seed differs per rank": {"data": OF_OWN_SEED + RIGHT["data"]},
    "different samples": {"data": "dataset = dataset.shard(size, rank).batch(12)"},
    "scaled rate": {"optimizer": "SGD(0.1 * size)"},
    "updates by the number of ranks": {"optimizer": "SGD(0.1 / size)"},
    "different updates": {"optimizer": "AdamW(0.1, weight_decay=0.2 * size)"},
    "updates differ per rank": {"optimizer": "SGD(0.1 * (rank + 1))"},
    "adapt saw part of the data": {
        "data": RIGHT["data"]
        + "\nlookup = tf.keras.layers.IntegerLookup(max_tokens=9)\nnumbered = dataset\n"
        "dataset = dataset.map(lambda x, y: tf.cast(9 * x[:, 0], tf.int64))\nlookup.adapt(dataset)\ndataset = numbered"
    },
    "random numbers": {"loss": "tf.reduce_mean(tf.square(z + tf.random.normal(tf.shape(z)) - y))"},
    "unknown": {
        "function": "@tf.function",
        "loss": "tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(z, z, transpose_b=True), axis=1))",
    },
    "shuffle seed differs per rank, none": {
        "data": "dataset = dataset.shuffle(48)\n" + RIGHT["data"]
    },
    ", two models": {
        "model": "source = tf.keras.Input([4])\n"
        "state = tf.keras.layers.Dense(2)(source)\n"
        "decoded = tf.keras.layers.GRU(2)(tf.keras.layers.Reshape([2, 2])(source), state)\n"
        "model = tf.keras.Model(source, tf.keras.layers.Dense(1)(decoded))",
        "start": "second = tf.keras.Sequential(\n"
        "    [tf.keras.Input([1]), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)])\n"
        "npu.distribute.broadcast(model.variables + second.variables)",
        "loss": "tf.reduce_mean(tf.square(second(z, training=True) - y))",
        "reduce": "gradients, _ = tf.clip_by_global_norm(gradients, 1e6)\n    "
        "assert None not in gradients\n    "
        'gradients = npu.distribute.all_reduce(gradients, compression="bf16")',
    },
    "other variables, of rank 1": {
        "reduce": "gradients = npu.distribute.all_reduce(gradients)[: 2 if rank else 4]"
    },
    "other variables": {
        "reduce": RIGHT["reduce"] + "\n    if size > 1:\n        gradients = gradients[:2]"
    },
    "not repeatable, from the start": {
        "start": "model.layers[0].kernel.assign(np.random.default_rng().normal(size=[4, 3]))\n"
        + RIGHT["start"]
    },
    "fewer steps": {"data": RIGHT["data"] + "\ndataset = dataset.take(2 // size)"},
    "different starts, unseeded": {
        "start": "model.layers[0].kernel.assign(np.random.default_rng().normal(size=[4, 3]))"
    },
    "not repeatable": {
        "data": """
order = np.random.default_rng().permutation(48)
dataset = tf.data.Dataset.from_tensor_slices((x[order], y[order]))
"""
        + RIGHT["data"],
        "reduce": 'gradients = npu.distribute.all_reduce(gradients, "sum")',
    },
}
NOT_COMPARABLE = ("random numbers", "fewer steps", "not repeatable")
OTHER_SAMPLES = (
    "same samples",
    "shuffle seed differs per rank",
    "different samples",
    "not repeatable",
)
"""What makes the ranks read other samples in each step."""
SAID = {
    "global batch size": "compute_average_loss",
    "add_loss per sample": "add_loss",
    "discarded result": "all_reduce(gradients)",
    "shuffle seed differs per rank": "shuffle(",
    "clipped before the reduction": "clip_by_global_norm",
    "random numbers": "random.normal",
}
"""What stands in the line that the verdict names."""


ONE_WRITER = """
import os
from npu_device._src.membership import rank_environment
first_process, rank_table = os.getpid(), rank_environment.rank_table
def written(*arguments):
    assert os.getpid() == first_process, "ranks that each write the table meet at different ports"
    return rank_table(*arguments)
rank_environment.rank_table = written
"""


def verified(
    directory: Path, source: str, cause: str, number: int, steps: int = 2, **options: bool
) -> Verdict:
    """Run a script as ``npurun verify`` does, and check the cause.

    Scripts have numbers: two or three ranks under either Keras occur, two ranks most often.
    """
    size = 3 if number % 8 == 1 else 2
    keras = "32"[number // 8 % 2 if size == 3 else number % 2]
    verdict = judged(directory, source, [size], keras, steps, **options)
    assert verdict.cause == cause, report.text(verdict)
    assert not verdict.code or (
        verdict.ranks == size and "\nWhat to do: " in verdict.text and "{" not in verdict.text
    )
    return verdict


def judged(
    directory: Path,
    source: str,
    sizes: list[int],
    keras: str,
    steps: int,
    rank_seconds: float = 0.0,
    **options: bool,
) -> Verdict:
    """Run a script in forks of a process that has imported TensorFlow, and return the verdict.

    Ranks are waited for so many seconds after their first step, by default as for users.
    """
    path = directory / "script.py"
    path.write_text(source)
    start = PlannedProcess(str(directory / "runs"), steps, sizes=sizes, **options)
    settings = json.dumps(asdict(start))
    runner = f"{ONE_WRITER}from npu_device._src.verify import runner\n"
    if rank_seconds:
        runner += f"runner._MOST_TIMES_SLOWER, runner.RECORDS_SECONDS = 0, {rank_seconds}\n"
    runner += f"runner.main([{settings!r}, {str(path)!r}])"
    variables = {"TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0"}
    variables["NPU_DEVICE_UNEQUAL_START"] = "ignore"  # else it is made right
    runs = directory / "runs"
    runs.mkdir()
    code = f"import os; os.chdir({str(directory)!r})\n{runner}"
    try:
        [begun] = job.run(runs, 1, code, 400, **variables)
    except AssertionError as error:
        logs = [f"--- {log}\n{log.read_text()[-9000:]}" for log in sorted(runs.rglob(LOG))]
        raise AssertionError("\n".join([str(error), *logs])) from None
    problem = runs / PROBLEM
    assert begun.code == 0, problem.read_text() if problem.exists() else begun.output
    return judge(start.stages())


@pytest.mark.parametrize("kind", some(list(WRONG)))
def test_causes_in_a_loop(kind: str, tmp_path: Path) -> None:
    cause, _, seed = kind.partition(", ")
    source = LOOP.format(
        **{**RIGHT, **{key: value.strip("\n") for key, value in WRONG[kind].items()}}
    )
    source = source.replace("seed=1", "" if seed == "none" else "seed=1")
    verdict = verified(tmp_path, source, cause, list(WRONG).index(kind))
    assert verdict.code == (0 if not cause else 3 if cause in NOT_COMPARABLE else 1)
    assert not list(tmp_path.glob("*.txt")) and all(
        line.split()[2] == "12" for line in verdict.table
    )
    samples = {line.split()[3] for line in verdict.table}
    assert samples == {"other" if kind in OTHER_SAMPLES else "same"}, report.text(verdict)
    gradients = {line.split()[4] for line in verdict.table}
    assert ("unknown" in gradients) == ("default_rng()" in source), report.text(verdict)
    assert verdict.table[-1].split()[-1] == "unknown", "no weights are recorded after the last step"
    assert any("clips its own gradients" in note for note in verdict.notes) == ("1e6" in source)
    assert any("dropout and noise" in note for note in verdict.notes) == ("Dropout(" in source)
    assert any("aren't synchronized" in note for note in verdict.notes) == (
        "BatchNormalization()" in source
    )
    assert any("by itself" in note for note in verdict.notes) == (cause == "normalized alone")
    if cause in SAID:
        line = next(
            number
            for number, text in enumerate(source.splitlines(), start=1)
            if SAID[cause] in text
        )
        assert f"script.py:{line}" in verdict.text
    for example in re.findall("```python\n(.+?)```", causes.TEXTS.get(kind, ""), flags=re.S):
        assert set(map(str.strip, example.splitlines())) <= set(map(str.strip, source.splitlines()))


FIT = """
import numpy as np, tensorflow as tf, npu_device as npu
npu.open(seed=1).as_default()
numbers = np.random.default_rng(0)
x = numbers.normal(size=[40, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)

class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.newest = tf.Variable([[0.0]], trainable=False)
        self.total = tf.keras.metrics.Mean(name="total")
        self.inner = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.BatchNormalization(),
                                          tf.keras.layers.GaussianNoise(0.5), tf.keras.layers.Dense(1)])

    def call(self, x, training=None):
        return self.inner(x, training=training)

{step}
model = {model}
model.compile(tf.keras.optimizers.{optimizer}, "mse", run_eagerly={eager})
model.fit(x, y, batch_size={batch}, epochs=3, verbose=0)
"""
PER_SAMPLE = """
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            loss = tf.reduce_sum(tf.square(z - y), axis=1)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
"""
MEAN = PER_SAMPLE.replace(
    "tf.reduce_sum(tf.square(z - y), axis=1)", "tf.reduce_mean(tf.square(z - y + self.newest))"
)
QUEUE = MEAN.replace("gradients =", "self.newest.assign(z[:1])\n        gradients =", 1)
OWN_METRIC = MEAN.replace(
    "return {",
    "self.total.update_state(tf.reduce_sum(z))\n        return {'total': self.total.result(), ",
)
LOCAL_LOG = MEAN.replace('"loss": loss', '"loss": tf.reduce_max(z)')
DIVIDED = "x, y = (each[npu.distribute.rank() :: npu.distribute.size()] for each in (x, y))"
MIXED = 'tf.keras.mixed_precision.set_global_policy("mixed_float16")'
REPLICATED = "npu.distribute.replicate(Model())"
FITS = {
    "mixed": ("", MIXED, REPLICATED, "SGD(0.1, momentum=0.9)"),
    "average": ("", "", REPLICATED, "AdamW(0.01, use_ema=True, gradient_accumulation_steps=2)"),
    "forgotten": ("same samples", "", "Model()", "Adam(0.01)"),
    "loss per sample": ("sum averaged", PER_SAMPLE, REPLICATED, "SGD(0.1)"),
    "queue": ("state in the step", QUEUE, REPLICATED, "SGD(0.1)"),
    "local log": ("different logs", LOCAL_LOG, REPLICATED, "SGD(0.1)"),
    "metric": ("metric of sums", OWN_METRIC, REPLICATED, "SGD(0.1)"),
    "loaded": ("not reduced", DIVIDED, "Model()", "Adam(0.01)"),
}


@pytest.mark.parametrize("name", some(list(FITS)))
def test_causes_in_fit(name: str, tmp_path: Path) -> None:
    cause, step, model, optimizer = FITS[name]
    eager, batch = (
        name != "mixed",
        10 if cause == "sum averaged" else 11,
    )  # uneven shares aren't halves
    source = FIT.format(
        step=step.strip("\n"), model=model, optimizer=optimizer, eager=eager, batch=batch
    )
    verdict = verified(tmp_path, source, cause, list(FITS).index(name))
    assert any(
        "in 1 layer(s)" in note and "they aren't synchronized" in note for note in verdict.notes
    )


SESSION = """
import numpy as np, tensorflow.compat.v1 as tf, npu_device as npu
from npu_bridge.npu_init import NPUDistributedOptimizer, npu_distributed_optimizer_wrapper
tf.disable_v2_behavior()
npu.open(seed=1).as_default()
rank, size = npu.distribute.rank(), npu.distribute.size()
numbers = np.random.default_rng(0)
x = numbers.normal(size=[48, 4]).astype("float32")
share = slice(rank * 48 // size, (rank + 1) * 48 // size)
for _ in range(size):
    tf.zeros([2])  # a graph with other operations
given = tf.placeholder(tf.float32, [None, 4])
weight = tf.get_variable("weight", [4, 1])
loss = {loss}
optimizer = tf.train.GradientDescentOptimizer(0.1)
train = {optimizer}.minimize(loss, global_step=tf.train.get_or_create_global_step())
start, hooks = {start}, [tf.train.StopAtStepHook(last_step=9)]
with {session} as session:
    {first}
    session.run(start)
    for _ in range(4):
        session.run([loss, train], {{given: x[share]}})
"""
SESSION_RIGHT = {
    "function": "",
    "loss": "tf.reduce_mean(tf.square(given @ weight - tf.reduce_sum(given, 1, keepdims=True)))",
    "optimizer": "NPUDistributedOptimizer(optimizer)",
    "start": "npu.distribute.broadcast(tf.global_variables())",
    "session": "tf.Session()",
    "first": "session.run(tf.global_variables_initializer())",
}
SESSIONS: dict[str, dict[str, str]] = {
    "": {"session": "tf.train.MonitoredTrainingSession(hooks=hooks)", "first": "pass"},
    "not reduced": {"optimizer": "optimizer"},
    "sum averaged": {"loss": SESSION_RIGHT["loss"].replace("reduce_mean", "reduce_sum")},
}


@pytest.mark.parametrize("cause", list(SESSIONS))
def test_causes_in_sessions(cause: str, tmp_path: Path) -> None:
    verified(tmp_path, SESSION.format(**{**SESSION_RIGHT, **SESSIONS[cause]}), cause, 0, steps=3)


HOROVOD = """
import numpy as np, tensorflow as tf, npu_device.horovod.tensorflow as hvd
import npu_device.horovod.keras as hvd_keras
hvd.init()
numbers = np.random.default_rng(0)
x = numbers.normal(size=[48, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(3), tf.keras.layers.Dense(1)])
model.layers[0].kernel.assign_add(tf.fill([4, 3], 0.1 * hvd.rank()))
optimizer = tf.keras.optimizers.SGD(0.1 * hvd.size())
if {fit}:
    score = tf.keras.metrics.R2Score(class_aggregation=None, name="score")
    model.compile(hvd_keras.DistributedOptimizer(optimizer), "mse", metrics=[score])
    sent = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    reader = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print(logs["score"][0]))
    model.fit(x, y, batch_size=12, verbose=0, callbacks=[sent, reader])
for x, y in tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48).batch(12):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = {tape}.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    {sent}
"""
_SENT = "hvd.broadcast_variables(model.variables, root_rank=0)"
HOROVODS = {
    "right": ("", "False", "hvd.DistributedGradientTape(tape)", _SENT),
    "right fit": ("", "True", "tape", ""),
    "forgotten": ("Horovod: not reduced", "False", "tape", _SENT),
    "not sent": ("Horovod: different variables", "False", "hvd.DistributedGradientTape(tape)", ""),
    "summed": (
        "Horovod: not the average",
        "False",
        "hvd.DistributedGradientTape(tape, op=hvd.Sum)",
        _SENT,
    ),
}


@pytest.mark.parametrize("name", list(HOROVODS))
def test_causes_in_scripts_of_horovod(name: str, tmp_path: Path) -> None:
    cause, fit, tape, sent = HOROVODS[name]
    source = HOROVOD.format(fit=fit, tape=tape, sent=sent or "pass")
    source = source.replace("shuffle(48)", "shuffle(48, seed=1)" if cause else "shuffle(48)")
    verdict = verified(tmp_path, source, cause, list(HOROVODS).index(name))
    assert verdict.code == (1 if cause else 0)
    assert any("compared with each other only" in note for note in verdict.notes)
    assert any("all ranks read the same samples" in note for note in verdict.notes) == bool(cause)


def record_of(
    changes: list[float], samples: list[int | None], start: float = 1.0
) -> compare.Record:
    """Return a record of steps whose gradients are changed by so much of their norm, and have such a sample."""
    steps = []
    for number, (change, sample) in enumerate(zip(changes, samples), start=1):
        gradients = np.full([3, compare.PROJECTIONS], 1 + change)
        weights = np.full([3, compare.PROJECTIONS], start)
        rows = Counter([] if sample is None else [sample])
        steps.append(compare.RecordedStep("o", number, "O", list("abc"), gradients, weights, rows))
    return compare.Record(steps, joined=True)


@pytest.mark.parametrize(
    ("perturbed", "samples", "expected"),
    [
        (
            record_of([0.2, 0.2], [5, 6]),
            [1, 2],
            "in step 1, the second run reads different samples",
        ),
        (
            record_of([0.0, 0.2], [1, 6]),
            [1, 2],
            "in step 2, the second run reads different samples",
        ),
        # Samples that a model has made are rounded, and rounding grows.
        (record_of([1e-6, 1e-4, 0.2], [1, 6, 7]), [1, 2, 3], None),
        (record_of([1e-6, 0.2], [1, 2]), [1, 2], None),
        # The model itself moves them so far.
        (record_of([0.2, 0.2], [1, 2]), [1, 2], None),
        (
            record_of([0.2], [1], start=2.0),
            [1],
            "in step 1, the second run begins with different variables",
        ),
        (record_of([1e-6], [1], start=2.0), [1], None),
        (
            record_of([0.2], [None]),
            [None],
            "in step 1, the second run computes different gradients",
        ),
        (record_of([1e-4, 0.2], [None, None]), [None, None], None),
    ],
)
def test_a_process_that_does_not_repeat_itself(
    perturbed: compare.Record, samples: list[int | None], expected: str | None
) -> None:
    single = record_of([0.0] * len(samples), samples)
    run = ComparedRun(single, perturbed, [single])
    assert run.not_repeatable() == expected
    assert causes.cause_of(run)[0] == ("not repeatable" if expected else "")
    lost = run.lost_in_rounding()
    assert bool(lost) == any(np.any(step.gradients > 1.1) for step in perturbed.steps)


@pytest.mark.parametrize(
    "perturbed", [record_of([0.2], [6]), record_of([0.2], [1], start=2.0)], ids=["data", "start"]
)
def test_gradients_that_never_deviate_show_nothing(
    perturbed: compare.Record, tmp_path: Path
) -> None:
    first_stage, ranks = PlannedProcess(str(tmp_path), 1, sizes=[2]).stages()
    records = [record_of([0.0], [1]), perturbed, record_of([0.1], [9]), record_of([0.1], [None])]
    for process, record in zip([*first_stage, *ranks], records):
        process.folder.mkdir(parents=True)
        record.save(process.folder)
    verdict = judge([first_stage, ranks])
    assert verdict.cause == "not repeatable"
    assert [line.split()[3:] for line in verdict.table] == [["other", "unknown", "unknown"]]


def test_variables_without_gradients_are_not_compared(tmp_path: Path) -> None:
    record = record_of([0.0, 0.0], [1, 2])
    record.steps[0].gradients[:2] = np.nan
    record.steps[1].gradients[1] = np.nan
    stages = PlannedProcess(str(tmp_path), 1, sizes=[2]).stages()
    for process in (process for stage in stages for process in stage):
        process.folder.mkdir(parents=True)
        record.save(process.folder)
    assert judge(stages).missed == ["b, whose gradients were None or NaN in all steps."]


def test_ranks_with_other_variables_have_no_average() -> None:
    ranks = []
    for trained in (2, 1):
        gradients = np.ones([trained, compare.PROJECTIONS])
        step = compare.RecordedStep(
            "o", 1, "O", ["a", "b"], gradients, np.ones([2, compare.PROJECTIONS])
        )
        step.tape_gradients[trained] = gradients
        ranks.append(compare.Record([step], uses_horovod=True))
    average = compare.average_of(ranks)
    cause, text = causes.cause_of(ComparedRun(average, average, ranks))
    assert cause == "other variables"
    assert "in step 1, rank 0 trains 2, and rank 1 1; b" in text


def deviating(single: compare.Record, perturbed: compare.Record, rank: compare.Record) -> set[str]:
    """Return the variables of which anything deviates in any step."""
    quantities = [
        each for step in compare.compare(single, perturbed, rank) for each in step.values()
    ]
    return {deviation.variable for deviations in quantities for deviation in deviations}


def test_rounding_shows_in_a_few_updates_only() -> None:
    """Adam's update of a gradient near 0 is all rounding, in other variables when inputs change than on ranks."""
    numbers = np.random.default_rng(0)
    gradients, weights = numbers.normal(size=[2, 8, compare.PROJECTIONS])

    def record(moved: list[int], by: float) -> compare.Record:
        later = 2 * weights
        later[moved] += by * weights[moved]
        steps = [
            compare.RecordedStep("o", number, "O", list("abcdefgh"), gradients, each, Counter([1]))
            for number, each in enumerate((weights, later))
        ]
        return compare.Record(steps)

    one, again = record([], 0), record([4, 5, 6, 7], 1e-5)
    assert not deviating(one, again, record([0], 1e-4))
    assert deviating(one, again, record([0], 1e-3)) == {"a"}


def test_a_gradient_that_is_rounding_hides_no_other() -> None:
    """The gradient of a bias before batch normalization is 0 but for rounding, which moves it altogether."""
    numbers = np.random.default_rng(0)
    gradients, weights = numbers.normal(size=[2, 4, compare.PROJECTIONS])

    def record(kernel: float) -> compare.Record:
        computed = gradients.copy()
        computed[0] *= kernel
        computed[1] = 1e-7 * numbers.normal(size=compare.PROJECTIONS)
        names = ["kernel", "bias", "gamma", "beta"]
        updates = [0 * weights, -0.1 * np.sign(computed)]  # an update of full size, as Adam's
        return compare.Record(
            [
                compare.RecordedStep(
                    "o", number, "O", names, computed, weights + update, Counter([1])
                )
                for number, update in enumerate(updates)
            ]
        )

    single, perturbed = record(1.0), record(1.0 + 1e-7)
    assert not deviating(single, perturbed, record(1.0 - 1e-7))
    assert deviating(single, perturbed, record(1.2)) == {"kernel"}


def test_samples_that_differ_only_by_rounding_before_a_deviation_are_no_cause() -> None:
    """A generator's samples may have other digests on each rank, while the gradients are those of one process."""

    def record(sample: int, third_gradient: float = 1.0) -> compare.Record:
        steps = []
        for number, gradient in enumerate((1.0, 1.0, third_gradient, third_gradient), start=1):
            projections = np.full([1, compare.PROJECTIONS], gradient)
            weights = np.ones([1, compare.PROJECTIONS])
            rows = Counter([sample + number])
            steps.append(compare.RecordedStep("o", number, "O", ["w"], projections, weights, rows))
        return compare.Record(steps)

    single = record(0)
    same = ComparedRun(single, single, [record(10)])
    assert not same.first_deviating and not same.step_with_other_samples()
    # Only the third step's samples may explain its gradients; the fourth step follows from it.
    different = ComparedRun(single, single, [record(10, third_gradient=2.0)])
    assert different.step_with_other_samples() is different.steps[2]
    assert [bool(step.other_samples()) for step in different.steps] == [False, False, True, True]


_FAIL_AFTER_ONE_STEP = """
    if size == 2 and int(optimizer.iterations) == 1:
        raise KeyError("two")"""
_ONE_PROCESS_FAILS = "assert size > 1"
FAILURES: dict[str, dict[str, str]] = {
    # 3 ranks were only tried.
    "": {"data": "assert 16 % size == 0, 'batch'\n" + RIGHT["data"].replace("12", "16")},
    "mean summed": {
        "reduce": "gradients = npu.distribute.all_reduce(gradients, 'sum' if size == 3 else 'mean')"
        + _FAIL_AFTER_ONE_STEP
    },
    "failed": {
        "model": """
def refuse_changed(inputs):
    if tf.is_tensor(inputs) and "optimizer" in globals() and int(optimizer.iterations) == 1:
        assert np.isin(inputs, samples).all(), "changed"
    return inputs
samples = x
model = tf.keras.Sequential([tf.keras.layers.Lambda(refuse_changed), tf.keras.layers.Dense(1)])""",
        "reduce": RIGHT["reduce"] + _FAIL_AFTER_ONE_STEP,
    },
    # The single process fails after its steps, and the ranks fail otherwise, or hang.
    "failed, before one process": {
        "reduce": RIGHT["reduce"] + _FAIL_AFTER_ONE_STEP,
        "end": _ONE_PROCESS_FAILS,
    },
    "failed, by a hang": {
        "reduce": RIGHT["reduce"]
        + """
    while rank and int(optimizer.iterations) == 1:
        import time; time.sleep(1)""",
        "end": _ONE_PROCESS_FAILS,
    },
}
SAID_OF_FAILURES = {
    "": "3 ranks: as 3 ranks, the script failed with exit code 1. The end of its output:",
    "mean summed": "what follows an error: as 2 ranks, the script failed",
    "failed": "what follows an error: as one process with perturbed inputs, the script failed",
    "failed, before one process": "2 ranks made 1 of its 2 steps.",
    "failed, by a hang": "2 ranks made 1 of its 2 steps.",
}


@pytest.mark.parametrize("kind", list(FAILURES))
def test_failures_hide_no_verdict(kind: str, tmp_path: Path) -> None:
    cause = kind.partition(",")[0]
    source = LOOP.format(**{**RIGHT, **FAILURES[kind]}) + FAILURES[kind].get("end", "")
    sizes = [2] if cause == "failed" else [2, 3]
    rank_seconds = 5.0 if "hang" in kind else 0.0
    verdict = judged(tmp_path, source, sizes, "3", 2, rank_seconds)
    assert verdict.cause == cause, report.text(verdict)
    assert verdict.code == {"": 0, "mean summed": 1, "failed": 3}[cause]
    assert any(SAID_OF_FAILURES[kind] in missed for missed in verdict.missed), verdict.missed
    assert (verdict.ranks == 3) == (cause == "mean summed")
    how = "made no further step within" if "hang" in kind else "failed"
    assert (f"as 2 ranks, the script {how}" in verdict.text) == (cause == "failed")


@pytest.mark.full
def test_ranks_that_hang_hide_no_verdict_if_they_were_only_tried(tmp_path: Path) -> None:
    hangs = "if size == 3:\n    import time; time.sleep(900)\n"
    source = LOOP.format(**{**RIGHT, "data": hangs + RIGHT["data"]})
    verdict = judged(tmp_path, source, [2, 3], "3", steps=2)
    assert not verdict.cause and verdict.code == 0, report.text(verdict)
    said = "3 ranks: as 3 ranks, the script made no step within"
    assert any(said in missed for missed in verdict.missed), verdict.missed


NO_CALL = """
import numpy as np, tensorflow as tf

class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1)
        self.lookup = tf.keras.layers.StringLookup()
        self.lookup.adapt(["a", "b"])  # these words are no variable in tf-keras

    def call(self, given):
        return self.dense(given["numbers"]) + 0.0 * tf.reduce_sum(tf.cast(self.lookup(given["word"]), tf.float32))

given = {"numbers": np.ones([12, 4]), "word": ["a", "b", "c"] * 4}
model = Model()
model.compile("sgd", "mse", run_eagerly=True)
model.fit(tf.data.Dataset.from_tensor_slices((given, np.ones([12, 1]))).batch(4), verbose=0)
"""


@pytest.mark.parametrize("replicate", [False, True])
def test_a_script_without_a_call(replicate: bool, tmp_path: Path) -> None:
    verdict = verified(
        tmp_path,
        NO_CALL,
        "" if replicate else "script does not use npu_device",
        4 if replicate else 3,
        replicates=replicate,
    )
    assert verdict.code == (0 if replicate else 3)
    assert ("npurun port" in verdict.text) != replicate
    assert any("sets no seed" in note for note in verdict.notes) != replicate


def test_the_pages_and_json() -> None:
    assert DOCS.read_text().endswith(causes.PAGE), "run: make docs"
    verdict = Verdict(
        1, "sum averaged", "gradients are <0.50>", ["2 1"], ["a note"], 2, {"<w>": 0.5, "b": None}
    )
    page = report.page(verdict)
    assert (
        "&lt;w&gt;" in page
        and "0.500" in page
        and "another direction" in page
        and "<w>" not in page
    )
    assert json.loads(json.dumps(asdict(verdict)))["cause"] == "sum averaged"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: script"),
        (["no_such.py"], "no such script: no_such.py"),
        (["-n", "1", "x.py"], "must be 2 or more"),
        (["--steps", "0", "x.py"], "is not a whole number of at least 1"),
        (["--hosts", "a,b", "x.py"], "verify runs on this host only"),
        (["-n", "100000", __file__], "need more memory than"),
        (["--html", "no/such/page.html", __file__], "there is no such directory"),
        (["--html", str(Path(__file__).parent), __file__], "is a directory"),
        (["--keep", str(Path(__file__).parent), __file__], "must be a new or empty directory"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        verify.main(arguments)
    assert ended.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_what_goes_wrong_in_verify_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["-n", "2", "--keep", "/proc/no/such", __file__]) == 3
    assert "npurun verify: failed: [Errno 2]" in capsys.readouterr().err


PATHS = """
import bz2, io, os, resource, shutil, sys, tarfile
from pathlib import Path
from npu_device._src.verify import file_shadow

Path("old.txt").write_text("old")
Path("kept").mkdir()
Path("kept", "inside.txt").write_text("old")
Path("../many").mkdir()
for number in range(500):
    Path("../many", str(number)).write_text("old")
os.truncate(os.open("../large", os.O_CREAT | os.O_WRONLY), 2 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # a copy would fail
files = file_shadow.Redirection(sys.argv[1])
files.move(Path(sys.argv[1], "files"))
files.install()
for name in ("old.txt", "new.txt"):
    Path(name).write_text("new")
    assert Path(name).read_text() == "new" and Path(name).exists() and Path(name).stat().st_size == 3
Path("../large").write_text("new")
Path("bytes").write_bytes(b"new")
with Path("added.txt").open("a") as file:
    file.write("new")
Path("added.txt").chmod(0o600)
Path("touched").touch()
shutil.copy2("touched", "copied")
shutil.chown("copied", os.getuid())
assert shutil.disk_usage("copied")
Path("old.txt").replace("moved.txt")
Path("new.txt").rename("old.txt")
Path("made").mkdir()
Path("made", "deep", "deeper").mkdir(parents=True)
Path("kept", "inside.txt").unlink()
Path("made", "deep", "deeper").rmdir()
names = {path.name for path in Path().iterdir()}
assert names == {path.name for path in Path().glob("*")} == set(os.listdir()), names
assert names >= {"old.txt", "moved.txt", "touched", "made"}, names
assert not Path("made", "deep", "deeper").exists()
with bz2.open("packed.bz2", "wt") as file:
    file.write("new")
with bz2.open("packed.bz2", "rt") as file:
    assert file.read() == "new"
with tarfile.open("packed.tar", "w") as file:
    file.add("old.txt")
assert tarfile.open("packed.tar").getnames() == ["old.txt"]
# Ranks need a copy at the same time, and each finds all of it.
children = []
for _ in range(4):
    child = os.fork()
    if not child:
        os.chmod("../many", 0o700)
        os._exit(len(os.listdir(sys.argv[1] + "/files" + os.path.abspath("../many"))) != 500)
    children.append(child)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


def test_files_stay_as_they_are_for_all_that_python_writes(tmp_path: Path) -> None:
    """Modules that were imported before, and pathlib up to Python 3.10, have copies of the functions to redirect."""
    work = tmp_path / "work"
    work.mkdir()
    words = [sys.executable, "-c", PATHS, str(tmp_path / "runs")]
    subprocess.run(words, check=True, cwd=work, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    left = {str(path.relative_to(work)): path for path in work.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in left.items()} == {
        "old.txt": "old",
        "kept/inside.txt": "old",
    }


MANAGED = """
import os, shutil
import tensorflow as tf, npu_device as npu
npu.open(seed=1)
w = tf.Variable(1.0)
optimizer = tf.keras.optimizers.SGD(0.1)
checkpoint = tf.train.Checkpoint(w=w)
manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=1)
last = manager.latest_checkpoint
if last is not None:
    assert tf.train.latest_checkpoint("saved").endswith("saved/ckpt-1"), tf.train.latest_checkpoint("saved")
    assert os.path.getsize(f"{last}.data-00000-of-00001") and tf.train.list_variables(last)
    shutil.copytree("saved", "copy", dirs_exist_ok=True)
    checkpoint.restore("copy/ckpt-1").assert_existing_objects_matched()
    assert manager.restore_or_initialize() == last and w == 2.0, w
w.assign(2.0)
for x in (1.0, 2.0):
    with tf.GradientTape() as tape:
        loss = (x * w) ** 2
    gradients = npu.distribute.all_reduce(tape.gradient(loss, [w]))
    if last is not None:
        optimizer.apply_gradients(zip(gradients, [w]))
if npu.distribute.is_main():
    print("saved", manager.save())
"""


def test_a_manager_restores_checkpoints_that_are_not_copied(tmp_path: Path) -> None:
    path = script(tmp_path, MANAGED)
    assert npurun("-n", "1", path, cwd=tmp_path).returncode == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    assert len(before) == 3
    done = npurun("verify", "-n", "2", "--keep", "kept", path, cwd=tmp_path, limit=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    copies = (tmp_path / "kept").glob(f"*/files{tmp_path}/saved/ckpt-1.data-*")
    assert not list(copies)


def test_ranks_end_with_the_process_that_has_forked_them(tmp_path: Path) -> None:
    """One process makes a step; of two ranks, one fails before that, and the other one waits for ever."""
    source = """
import os, time
import numpy as np, npu_device as npu
npu.open().as_default()
if npu.distribute.size() > 1:
    print("rank is", os.getpid(), flush=True)
    time.sleep(1)  # until both have printed it
    raise SystemExit(4) if npu.distribute.rank() else time.sleep(300)
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones([2, 1]), np.ones([2, 1]))
"""
    with pytest.raises(AssertionError, match="the script failed with exit code 4"):
        judged(tmp_path, source, [2], "3", 2)
    logs = [path.read_text() for path in (tmp_path / "runs" / "ranks2").rglob(LOG)]
    ranks = [number for log in logs for number in re.findall(r"rank is (\d+)", log)]
    assert len(ranks) == 2
    until = time.monotonic() + 10
    while running := [rank for rank in ranks if _is_running(rank)]:
        assert time.monotonic() < until, running
        time.sleep(0.02)


def _is_running(pid: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        # Empty for a process that has ended, but that nobody has waited for.
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


def test_changed_files_are_looked_for_among_the_first(tmp_path: Path) -> None:
    for name in ("b/one", "b/two", "c/three", "d/four"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "gone").symlink_to("nowhere")
    folders = [tmp_path / "b", tmp_path, tmp_path / "too many"]
    left = iter(folders)
    # Three files and a folder, another folder, and another one with one file.
    changed = file_shadow.changed_since(0.0, left, tmp_path / "runs", 4 + 1 + 2)
    assert changed == [str(tmp_path / name) for name in ("b/one", "b/two", "c/three")]
    assert list(left) == folders[2:]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('no step')", "the script ended before its first step"),
        (
            "import json\njson.loads('broken')",
            "as one process, the script ended before its first step",
        ),
        (
            "import os\nos.makedirs('run/one')\nos.chdir('run/one')",
            "This run has written run/one, and keeps it apart.",
        ),
    ],
)
def test_scripts_that_make_no_step(source: str, expected: str, tmp_path: Path) -> None:
    done = npurun("verify", "-n", "2", script(tmp_path, source))
    assert done.returncode == 3
    assert expected in done.stderr.decode()
    frames = re.findall(r'File "([^"]+)", line (\d+)', done.stderr.decode())
    lines = {"print": [], "import json": ["2"], "import os": ["3"]}[re.split("[(\n]", source)[0]]
    assert frames == [(str(tmp_path / "script.py"), number) for number in lines]


EXAMPLES = {  # that npurun starts, and their arguments
    **dict.fromkeys(
        [f"recipes/{path.name}" for path in (ROOT / "examples" / "recipes").glob("*.py")], ""
    ),
    "keras_fit/train.py": "--directory saved",
    "npu_bridge/train.py": "",
    "resnet_ctl/resnet_ctl.py": "--data_dir digits",
    "soak/train.py": "--directory saved --steps 20",
}


@pytest.mark.full
@pytest.mark.parametrize("keras", ["2", "3"])
@pytest.mark.parametrize("path", EXAMPLES)
def test_examples(path: str, keras: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    if "resnet_ctl" in path:
        pytest.importorskip("official")
        maker = [sys.executable, str(ROOT / "examples" / "resnet_ctl" / "make_digits_imagenet.py")]
        subprocess.run([*maker, "--data_dir", str(tmp_path / "digits")], check=True, timeout=200)
    variables = {"PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0"}
    words = [str(ROOT / "examples" / path), *EXAMPLES[path].split()]
    done = npurun("verify", "-n", "2", "--steps", "2", *words, cwd=tmp_path, limit=500, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


# A folder in /tmp that the script names itself: a run would end if it found what another has written there.
IN_TMP = """
import socket, tempfile
folder = os.path.join(tempfile.gettempdir(), "npu_verify_test")
os.makedirs(folder, exist_ok=True)
os.close(os.open(os.path.join(folder, str(rank)), os.O_CREAT | os.O_EXCL))
tempfile.mkdtemp(prefix="npu_verify_test")
with tempfile.TemporaryDirectory() as made, socket.socket(socket.AF_UNIX) as listener:
    listener.bind(os.path.join(made, "socket"))
"""


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    """Three ranks, for which nobody has asked, can't divide the batch."""
    data = RIGHT["data"].replace("12", "16")
    changes = {"loss": WRONG["sum averaged"]["loss"], "data": data, "function": IN_TMP}
    source = LOOP.format(**{**RIGHT, **changes})
    page = tmp_path / "page.html"
    done = npurun(
        "verify",
        "--steps",
        "2",
        "--html",
        str(page),
        script(tmp_path, source),
        cwd=tmp_path,
        limit=180,
    )
    assert done.returncode == 1, done.stderr
    text = done.stdout.decode()
    assert "3 ranks were left out: the global batch size can't be divided by 3" in text
    assert "differs on 2 ranks: Gradients are 0.50 times the single-process ones" in text
    assert page.exists() and not (tmp_path / "result.txt").exists()
    assert not list(Path(tempfile.gettempdir()).glob("npu_verify_test*"))
