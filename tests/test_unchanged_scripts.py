"""``npurun --replicate``: Keras scripts without a call of this package train on many ranks as on one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import job
import pytest
from launcher import environment, npurun, script

TRAIN = """
import random, numpy as np
drawn = random.random(), np.random.rand()
import tensorflow as tf
keras = tf.keras
x = np.random.normal(size=[40, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        self.fits = 0

    def call(self, x):
        return self.inner(x)

    def fit(self, *args, **kwargs):
        self.fits += 1
        return super().fit(*args, **kwargs)

model = Own()
model.compile(keras.optimizers.SGD(0.05), "mse")
losses = [model.fit(x, y, batch_size=11, verbose=0).history["loss"][-1] for _ in range(2)]
losses.append(model.evaluate(x, y, verbose=0))
losses.append(model.train_on_batch(x[:10], y[:10]))
by_hand, picture = keras.optimizers.SGD(0.1), tf.Variable([1.0])  # of no model
for _ in range(12):
    by_hand.apply_gradients([(picture, picture)])
slots = keras.optimizers.Adam(0.0)
slots.apply_gradients([(weight * 0.0, weight) for weight in model.trainable_variables])
weights = [float(np.square(weight).sum()) for weight in model.get_weights()]
import json
print("RESULT", json.dumps([list(drawn), np.ravel(losses).tolist(), weights, model.fits]))
"""


def run(directory: Path, size: int, keras: str, text: str) -> list[job.Ended]:
    """Run a script in ranks that are forks of a process which has imported TensorFlow and the public names."""
    directory.mkdir()
    path = script(directory, text, "user.py")
    start = f"""
import sys
for name in [name for name in sys.modules if name.startswith(("npu_device._api", "npu_device.distribute"))]:
    del sys.modules[name]
from npu_device._src.replicate import main_program
main_program.main(["1", {path!r}])
"""
    return job.run(directory, size, start, 150, TF_USE_LEGACY_KERAS="1" if keras == "2" else "0")


def result(ended: job.Ended) -> list[list[float]]:
    assert ended.code == 0, ended.output
    return json.loads(re.findall("RESULT (.*)", ended.output)[0])  # type: ignore[no-any-return]


def test_unchanged_script(keras: str, tmp_path: Path) -> None:
    [alone] = map(result, run(tmp_path / "alone", 1, keras, TRAIN))
    ranks = list(map(result, run(tmp_path / "ranks", 2, keras, TRAIN)))
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] == alone[0] and ranks[0][3] == alone[3] == 2
    assert ranks[0][1] == pytest.approx(alone[1], rel=1e-4)
    assert ranks[0][2] == pytest.approx(alone[2], rel=1e-4)


LOOP = """
import tensorflow as tf
model, optimizer = tf.keras.Sequential([tf.keras.layers.Dense(1)]), tf.keras.optimizers.SGD(0.1, 0.9)
model.build([None, 1])

def step():
    optimizer.apply_gradients([(tf.ones_like(variable), variable) for variable in model.trainable_variables])

for number in range(10):
    step()
    print("step", number)
"""
GRAPH = LOOP.replace("def step", "@tf.function\ndef step")
WITHOUT_MODEL = LOOP.replace(
    "for variable in model.trainable_variables", "for variable in [variable]"
).replace("\n\ndef", "\nvariable = tf.Variable([1.0])\n\ndef")


@pytest.mark.parametrize(
    ("text", "keras", "expected"),
    [
        (LOOP, "3", "SGD is used in a custom training loop"),
        (WITHOUT_MODEL, "3", "SGD is used in a custom training loop"),
        (GRAPH, "2", "npurun port shows what to add"),
        (
            "import tensorflow, npu_device as npu\nnpu.open()",
            "3",
            "the script uses npu_device, and so reduces",
        ),
        (
            "import tensorflow\nimport horovod.tensorflow as hvd",
            "3",
            "start it with npurun --horovod",
        ),
    ],
    ids=["loop", "without model", "function, tf-keras", "npu_device", "horovod"],
)
def test_scripts_that_replicate_cannot_serve_are_errors(
    text: str, keras: str, expected: str, tmp_path: Path
) -> None:
    ended = run(tmp_path / "ranks", 2, keras, text)
    assert all(rank.code == 1 and expected in rank.output for rank in ended), ended[0].output
    assert all(
        ("step 8" in rank.output, "step 9" in rank.output) == ("step" in text, False)
        for rank in ended
    )


FAILS = """
import numpy as np, tensorflow as tf
keras = tf.keras

class Fragile(keras.layers.Layer):
    @property
    def save(self):
        raise RuntimeError("broken")

    def call(self, x):
        return x

model = keras.Sequential([keras.Input([2]), Fragile(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for _ in range(2):
    try:
        model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    except RuntimeError as error:
        print("refused", error)
"""


def test_a_model_that_cannot_be_replicated_never_trains_alone(keras: str, tmp_path: Path) -> None:
    for ended in run(tmp_path / "ranks", 2, keras, FAILS):
        assert ended.output.count("refused broken") == 2, ended.output


def test_what_stays_alone(tmp_path: Path) -> None:
    """A script without fit is told so; a child of a rank trains by itself."""
    text = LOOP.replace(
        "import tensorflow as tf",
        "import os, tensorflow as tf\nif os.fork():\n    os.wait(), exit()",
    )
    ended = run(tmp_path / "ranks", 2, "3", text)
    assert [rank.code for rank in ended] == [0, 0] and "RuntimeError" not in ended[0].output
    assert "called fit, evaluate or predict of no Keras model" in ended[0].output


def test_another_backend_of_keras_is_refused(tmp_path: Path) -> None:
    """Keras of another backend; a few lines stand for it, whose backends aren't installed here."""
    script(tmp_path, "class backend:\n    backend = staticmethod(lambda: 'jax')", "keras.py")
    command = [
        sys.executable,
        "-m",
        "npu_device._src.replicate.main_program",
        "1",
        script(tmp_path, "import keras"),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 1 and b"--replicate: the Keras backend is jax" in done.stderr


def test_from_the_command_line(tmp_path: Path) -> None:
    text = "import os, random, sys\nprint(random.random(), hash('a'), os.environ['PYTHONHASHSEED'], sys.argv[1:])"
    done = npurun("--replicate", "--seed", "7", "-n", "2", script(tmp_path, text), "--batch", "3")
    lines = {line.partition(" ")[2] for line in done.stdout.decode().splitlines()}
    assert done.returncode == 0 and len(lines) == 1 and lines.pop().endswith("7 ['--batch', '3']")
    assert b"--replicate takes a .py file" in npurun("--replicate", "sh", "-c", "true").stderr


STOPS_WITHIN_AN_EPOCH = """
import time
import numpy as np
import tensorflow as tf
keras = tf.keras

class Samples(keras.utils.PyDataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        end = time.perf_counter() + 0.05
        # Python code that holds the interpreter's lock, as a thread of TensorFlow runs it
        while time.perf_counter() < end:
            pass
        return np.ones([4, 2], "float32"), np.ones([4, 1], "float32")

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True

model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(Samples(), shuffle=False, verbose=0, callbacks=[Stop()])
"""


def test_python_ends_though_fit_left_an_iterator_over_python_code(tmp_path: Path) -> None:
    path = script(tmp_path, STOPS_WITHIN_AN_EPOCH)
    # Without this package, such a script hangs at its end.
    assert npurun("-n", "2", "--replicate", path, limit=120).returncode == 0
