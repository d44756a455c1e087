"""``npurun port``: each rule's example, what is refused, the files, and two scripts that train."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launcher import environment
from pool import Pool

pytest.importorskip("libcst")

from npu_device._src.port.__main__ import main
from npu_device._src.port.porting import port_text as port
from npu_device._src.port.rules import PAGE, RULES

DOCS = Path(__file__).parent.parent / "docs" / "porting_rules.md"

OPEN = "+import npu_device as npu\n+npu.open(seed=1)\n"
HEAD = (
    " import os\n import matplotlib.pyplot as plt\n import numpy as np\n import tensorflow as tf\n"
)
FIT = ' model.compile("sgd", "mse")\n+model = npu.distribute.replicate(model)\n model.fit(x, y)\n'
VARIABLE = " w = tf.Variable(1.0)\n optimizer = tf.keras.optimizers.SGD(0.1)\n"
STEP = RULES["reduce"].example
BROADCAST = "+npu.distribute.broadcast([w], root_rank=0)\n"
MAKE_DATA = RULES["shard"].example
LOOP = BROADCAST + " for x, y in dataset:\n     step(x, y)\n"
DATA = MAKE_DATA + LOOP
SESSION = (
    " import tensorflow.compat.v1 as tf\n+import npu_device as npu\n"
    "+from npu_bridge.npu_init import NPUDistributedOptimizer\n{imports}+npu.open(seed=1)\n"
    " w = tf.get_variable('w', [])\n"
)
V1_STEP = RULES["session: optimizer"].example
BROADCASTS = "+from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables\n"
HOOKS = "+from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook\n"
V1_OPEN = " session = tf.Session()\n"

FRAMES = {
    "open": f"{HEAD}{{}}{FIT}",
    "reduce": f"{HEAD}{OPEN}{VARIABLE}{{}}{DATA}",
    "broadcast": f"{HEAD}{OPEN} optimizer = tf.keras.optimizers.SGD(0.1)\n{STEP}{MAKE_DATA}{{}}",
    "shard": f"{HEAD}{OPEN}{VARIABLE}{STEP}{{}}{LOOP}",
    "batch size in a shape": f"{HEAD}{OPEN} batch_size = 32\n{VARIABLE}{{}}     step2(x, x)\n"
    + STEP.replace("step(", "step2(")
    + DATA.replace("32", "batch_size").replace("step(x, y)", "step(x)"),
    "share of an array": f"{HEAD}{OPEN}{VARIABLE}{STEP}{BROADCAST}{{}}",
    "no dataset": f"{HEAD}{VARIABLE}{STEP}{{}}",
    "download if missing": f"{HEAD} import urllib.request\n{OPEN}{{}}{FIT}",
    "strategy.reduce": f"{HEAD}{OPEN}{VARIABLE}{STEP}{DATA}{{}}",
    "sum outside of training": f"{HEAD}{VARIABLE}{STEP} def evaluate(x, y):\n     return x * w - y\n"
    f"{DATA}{{}}",
    "strategy": f"{HEAD}{OPEN}{{}}     model.compile()\n+    model = npu.distribute.replicate(model)\n"
    " model.fit(x, y)\n",
    "checkpoint manager": f"{HEAD} model.compile()\n{{}}",
    "horovod": "{}",
    "other Horovod modules": "{}",
    "session: optimizer": SESSION.format(imports="") + "{}" + V1_OPEN,
    "layers of TensorFlow 1": SESSION.format(imports="") + "{}" + V1_STEP + V1_OPEN,
    "session: broadcast": SESSION.format(imports=BROADCASTS) + V1_STEP + V1_OPEN + "{}",
    "session: hook": SESSION.format(imports=HOOKS) + V1_STEP + "{}",
    "TensorFlow 1": "{} tf.train.AdamOptimizer(0.1)\n",
    "gone from TensorFlow": " import tensorflow as tf\n{} tf.Session()\n",
}
"""Around the example of a rule, in the form of a diff as well; the others stand in a script with ``fit``."""


def sides(diff: str) -> tuple[str, str]:
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] for line in lines if line[0] != "+"), "".join(
        line[1:] for line in lines if line[0] != "-"
    )


@pytest.mark.parametrize(
    "name", [rule.name for rule in RULES.values() if rule.example and not rule.choices]
)
def test_an_example_is_ported_as_the_page_shows(name: str) -> None:
    frame = FRAMES.get(name) or f"{HEAD}{OPEN}{{}}" + (
        "" if ".fit(" in RULES[name].example else FIT
    )
    before, after = sides(frame.format(RULES[name].example))
    ported, findings = port(before)
    assert ported == after
    assert name in {finding.rule for finding in findings}
    assert port(after) == (after, [])


@pytest.mark.parametrize(
    "name", [rule.name for rule in RULES.values() if rule.example and rule.choices]
)
def test_a_question_leaves_the_file(name: str) -> None:
    before, _ = sides(
        FRAMES.get(name, f"{HEAD} w = tf.Variable(1.0)\n{{}}").format(RULES[name].example)
    )
    ported, findings = port(before)
    assert ported == before
    [asked] = [finding for finding in findings if finding.rule == name]
    assert asked.choices == RULES[name].choices
    assert asked.code == before.splitlines()[asked.line - 1].strip()


LOSSES = {
    "tf.reduce_mean((x * w - y) ** 2)": "mean",
    "tf.reduce_sum((x * w - y) ** 2)": "sum",
    "tf.reduce_sum((x * w - y) ** 2) / 64": "sum",
    "tf.reduce_sum((x * w - y) ** 2) / tf.cast(tf.shape(x)[0], tf.float32)": "mean",
    "tf.nn.compute_average_loss((x * w - y) ** 2, global_batch_size=64)": "sum",
    "tf.keras.losses.MeanSquaredError()(y, x * w)": "mean",
    "tf.keras.losses.mean_squared_error(y, x * w)": "sum",
    "tf.reduce_mean(tf.reduce_sum((x * w - y) ** 2, axis=1))": "mean",
    "tf.reduce_mean(tf.reduce_sum((x * w - y) ** 2))": "sum",
    "tf.reduce_mean((x * w - y) ** 2) + 0.1 * tf.nn.l2_loss(w)": "mean",
    "tf.reduce_sum((x * w - y) ** 2) + 0.1 * tf.nn.l2_loss(w)": "",
    "tf.reduce_sum((x * w - y) ** 2) / tf.reduce_sum(mask)": "",
    "criterion(y, x * w)": "",
    "tf.reduce_mean(x * w - y) / strategy.num_replicas_in_sync": "sum",
    "tf.reduce_mean(x * w - y) / tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, x.dtype)": "sum",
    "tf.reduce_sum(x * w - y) / (32 * strategy.num_replicas_in_sync)": "sum",
    "tf.reduce_sum(x * w - y) / (32 * len(gpus))": "sum",
    "tf.reduce_mean(x * w - y) * (1.0 / strategy.num_replicas_in_sync)": "",
    "tf.reduce_mean((x * w - y) / strategy.num_replicas_in_sync)": "",
    "tf.reduce_mean(x * w - y) / num_replicas": "",
    "tf.reduce_mean(x * w - y) / FLAGS.num_gpus": "",
    "tf.reduce_mean(x * w - y) / len(devices)": "",
    "tf.sqrt(tf.reduce_mean((x * w - y) ** 2))": "",
    "tf.math.divide_no_nan(tf.reduce_sum(x * w - y), tf.reduce_sum(mask))": "",
    "tf.reduce_max(x * w - y)": "",
}


@pytest.mark.parametrize(("loss", "expected"), LOSSES.items())
def test_sum_or_mean(loss: str, expected: str) -> None:
    before, _ = sides(f"{HEAD}{VARIABLE}{STEP}{DATA}")
    ported, findings = port(before.replace("tf.reduce_mean((x * w - y) ** 2)", loss))
    assert (
        f'reduction="{expected}"' in ported
        if expected
        else "sum or mean" in {each.rule for each in findings}
    )
    # In a session, gradients are averaged.
    before, _ = sides(f"{SESSION}{V1_STEP}{V1_OPEN}".format(imports=""))
    _, findings = port(before.replace("tf.reduce_mean(w)", loss))
    assert ("sum or mean" in {each.rule for each in findings}) == (expected != "mean")


MAKER = (
    " def make(x):\n     return tf.data.Dataset.from_tensor_slices((x, x)).batch(8)\n"
    " train, rest = make(x), make(x)\n"
)
SEEN = {
    "a parameter is another model": (
        f"{FIT} def train(model):\n+    npu.distribute.replicate(model)\n     model.fit(x, y, epochs=2)\n",
        "fit",
    ),
    "a helper makes two datasets": (
        f"{VARIABLE}{STEP}{MAKER} for x, y in train:\n     step(x, y)\n".replace("+", "#"),
        "several datasets",
    ),
    "another function takes the tape": (
        " with tf.GradientTape() as tape:\n     loss = 1\n minimize(tape, loss)\n",
        "gradients from elsewhere",
    ),
    "the train step calls a method": (
        " class GAN(tf.keras.Model):\n     def train_step(self, x):\n         return self.step(x)\n"
        "     def step(self, x):\n"
        "         with tf.GradientTape() as tape:\n             loss = x\n"
        "         self.optimizer.apply_gradients(zip(tape.gradient(loss, [w]), [w]))\n gan = GAN()\n"
        "+gan = npu.distribute.replicate(gan)\n gan.fit(x)\n",
        "fit",
    ),
    "a layer draws": (
        " class Noise(tf.keras.layers.Layer):\n     def call(self, x):\n         return tf.random.normal(tf.shape(x))\n"
        + FIT,
        "noise",
    ),
    "a parameter has the name of a module": (
        " def make(os):\n     os.makedirs('a')\n" + FIT,
        "fit",
    ),
    "a parameter has the name of a global": (
        f"{VARIABLE} loss = tf.reduce_mean(w)\n def half(loss):\n     return loss / 2\n"
        + STEP.replace(
            "tf.reduce_mean((x * w - y) ** 2)", "half(tf.reduce_sum(x * w - y))"
        ).replace('"mean"', '"sum"')
        + DATA,
        "reduce",
    ),
    "a parameter has the name of an alias": (
        " rng = np.random.default_rng\n call = lambda rng: rng()\n drawn = [rng() for rng in call.all]\n"
        " def draw(*rng):\n     return rng()\n" + FIT,
        "fit",
    ),
    "with gives the name of an alias another value": (
        " rng = np.random.default_rng\n def draw():\n     with stream() as rng:\n         return rng()\n"
        " def draw_two():\n     with stream() as (rng, _):\n         return rng()\n" + FIT,
        "fit",
    ),
    "with gives the name of a module another value": (
        "-os.makedirs('a')\n+os.makedirs('a', exist_ok=True)\n"
        " with stream() as os:\n     os.makedirs('b')\n" + FIT,
        "makedirs",
    ),
    "an expression gives names of imports other values": (
        " rng = np.random.default_rng\n def draw():\n     if (rng := stream()):\n         return rng()\n"
        " if (os := stream()):\n     os.makedirs('a')\n"
        " def draw_all():\n     last = [(np := stream()) for _ in x]\n     return np.random.default_rng()\n"
        + FIT,
        "fit",
    ),
    "an error has the name of a module": (
        " try:\n     load(x)\n except OSError as os:\n     os.makedirs('a')\n" + FIT,
        "fit",
    ),
    "a name with a type is an alias, or no longer one": (
        " rng: object = np.random.default_rng\n-drawn = rng()\n+drawn = rng(1)\n"
        " def draw():\n     rng: object = stream()\n     return rng()\n" + FIT,
        "generator",
    ),
    "an import may be replaced": (
        " if x:\n     np = None\n os = os or None\n-drawn = np.random.default_rng()\n"
        "+drawn = np.random.default_rng(1)\n-os.makedirs('a')\n+os.makedirs('a', exist_ok=True)\n"
        + FIT,
        "generator",
    ),
    "a lambda trains its parameter": (
        " train = lambda model: model.fit(x, y, epochs=2)\n train(tf.keras.Model(x))\n",
        "unknown fit",
    ),
    "a comprehension compiles models": (
        ' [models[index].compile("sgd", "mse") for index in range(2)]\n' + FIT.replace("+", "#"),
        "unknown fit",
    ),
    "a function passes its model on to itself": (
        f"{VARIABLE} def make(model):\n     return make(model)\n model = make(tf.keras.Model(x))\n"
        + STEP.replace("[w]", "model.trainable_variables")
        + MAKE_DATA
        + " for x, y in dataset:\n     step(x, y)\n",
        "no broadcast",
    ),
    "classes derive from each other": (
        " class Base(Derived):\n     pass\n class Derived(Base):\n     pass\n Base().fit(x)\n"
        + FIT,
        "fit",
    ),
    "a layer normalizes": (
        " layer = tf.keras.layers.BatchNormalization()\n" + FIT,
        "batch normalization",
    ),
    "gradients are clipped into a tuple": (
        VARIABLE
        + STEP.replace(
            "     optimizer.",
            "     gradients, _ = tf.clip_by_global_norm(gradients, 1.0)\n     optimizer.",
        )
        + DATA,
        "reduce",
    ),
    "gradients are divided by the number of replicas": (
        (VARIABLE + STEP + DATA)
        .replace(
            "     opt",
            "     gradients = [g / strategy.num_replicas_in_sync for g in gradients]\n     opt",
        )
        .replace("\n+", "\n#")
        .replace("\n-", "\n "),
        "gradients from elsewhere",
    ),
    "a loss of fit is divided by the number of replicas": (
        " def loss(y, x):\n     return tf.reduce_mean(x - y) / strategy.num_replicas_in_sync\n"
        " model.compile('sgd', loss)\n model.fit(x, y)\n",
        "unsupported strategy calls",
    ),
    "what moves to another line is ported there": (
        f"{VARIABLE}{STEP}"
        "-dataset = tf.data.Dataset.from_tensors(np.random.default_rng()).batch(strategy.num_replicas_in_sync)\n"
        "+dataset, rank_batch = npu.distribute.shard_and_rebatch_dataset("
        "tf.data.Dataset.from_tensors(np.random.default_rng(1)), npu.distribute.size())\n"
        f"+dataset = dataset.batch(rank_batch)\n{LOOP}"
        "     loss, _ = strategy.run(step, args=(x, y))\n"
        "-total = strategy.reduce('SUM', loss / strategy.num_replicas_in_sync, axis=None)\n"
        '+total = npu.distribute.all_reduce(loss / npu.distribute.size(), reduction="sum")\n'
        "-best = strategy.reduce('MEAN', evaluate(w), axis=None)\n"
        '+best = npu.distribute.all_reduce(evaluate(w), reduction="mean")\n',
        "replicas",
    ),
    "only what leads to a step is divided": (
        f"{VARIABLE}{STEP}{BROADCAST} for epoch in range(3):\n     for i in range(0, 100, 20):\n"
        "         a, b = x[i : i + 20], y[i : i + 20]\n"
        "+        a = a[npu.distribute.rank() :: npu.distribute.size()]\n"
        "+        b = b[npu.distribute.rank() :: npu.distribute.size()]\n"
        "         a = a / 255\n         step(a, b)\n         last = losses[i - 5 : i]\n"
        "     for i in range(0, 100, 20):\n         a, b = x_val[i : i + 20], y_val[i : i + 20]\n"
        "         total += criterion(b, model(a))\n     recent = losses[epoch - 5 : epoch]\n",
        "share of an array",
    ),
    "a batch is cut out of a part": (
        f"{VARIABLE}{STEP}{BROADCAST} for k in range(3):\n     part = x[k * 100 : k * 100 + 100]\n"
        "     for i in range(0, 100, 20):\n         a = part[i : i + 20]\n"
        "+        a = a[npu.distribute.rank() :: npu.distribute.size()]\n         step(a, a)\n",
        "share of an array",
    ),
    "the loop takes batches of validation": (
        f"{VARIABLE} rest = iter(tf.data.Dataset.range(9).batch(3))\n{BROADCAST}"
        " for i in range(0, 100, 20):\n     a = x[i : i + 20]\n"
        "+    a = a[npu.distribute.rank() :: npu.distribute.size()]\n"
        "     with tf.GradientTape() as tape:\n         loss = tf.reduce_mean(a * w)\n"
        "     gradients = tape.gradient(loss, [w])\n"
        '+    gradients = npu.distribute.all_reduce(gradients, reduction="mean")\n'
        "     optimizer.apply_gradients(zip(gradients, [w]))\n     total += model(next(rest))\n",
        "share of an array",
    ),
    "a function compiles a model of the script": (
        " model = tf.keras.Sequential([])\n def main():\n     model.compile('sgd', 'mse')\n"
        "+    npu.distribute.replicate(model)\n     model.fit(x, y)\n main()\n",
        "fit",
    ),
    "names of new lines are taken": (
        f"{VARIABLE}{STEP} dataset = 'mnist'\n rank_batch = 1\n"
        f"{BROADCAST}+dataset_, rank_batch_ = "
        "npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(99), 8)\n"
        "-for x in tf.data.Dataset.range(99).batch(8):\n+for x in dataset_.batch(rank_batch_):\n"
        "     step(x, x)\n",
        "shard",
    ),
    "two models have one name": (
        FIT + FIT + FIT.replace(" model.compile", " model = build()\n model.compile"),
        "fit",
    ),
    "each branch compiles": (
        " if small:\n     model = f()\n     model.compile()\n+    model = npu.distribute.replicate(model)\n"
        " else:\n     model = g()\n     model.compile()\n+    model = npu.distribute.replicate(model)\n"
        " model.fit(x, y)\n",
        "fit",
    ),
    "one branch compiles": (
        " if path:\n     model = tf.keras.models.load_model(path)\n"
        " else:\n     model = g()\n     model.compile()\n+    model = npu.distribute.replicate(model)\n"
        "+npu.distribute.replicate(model)\n model.fit(x, y)\n",
        "fit",
    ),
    "both branches are compiled together": (
        f" if small:\n     model = f()\n else:\n     model = g()\n{FIT}",
        "fit",
    ),
    "no branch compiles": (
        " if small:\n     model = tf.keras.models.load_model('a')\n"
        " else:\n     model = tf.keras.models.load_model('b')\n"
        "+npu.distribute.replicate(model)\n model.fit(x, y)\n",
        "fit",
    ),
    "a model of the same name in another function": (
        " def train(x):\n     model = g()\n     model.compile()\n+    model = npu.distribute.replicate(model)\n"
        "     model.fit(x)\n     model.save('a.keras')\n"
        " def other():\n     model = tf.keras.Sequential([])\n"
        "+    if npu.distribute.is_main():\n+        model.save('b.keras')\n".replace(
            "+        m", "+        m"
        )
        + "-    model.save('b.keras')\n",
        "save",
    ),
    "arguments have comments": (
        " os.makedirs(\n-    folder,  # for models\n+    folder, exist_ok=True,  # for models\n )\n"
        " os.makedirs(\n-    folder  # for models\n+    folder, exist_ok=True  # for models\n )\n"
        + FIT,
        "makedirs",
    ),
    "only rank 0 would leave the loop": (
        FIT + " for epoch in x:\n     with open('log', 'a') as file:\n         file.write('a')\n"
        "         if epoch > 3:\n             break\n",
        "write",
    ),
    "only rank 0 would know a name": (
        FIT
        + " print(last := len(x))\n with open('log', 'w') as file:\n     import json\n"
        " with open('log', 'w') as file:\n     for last in x:\n         file.write(last)\n print(last)\n".replace(
            " print(last)", "-print(last)\n+if npu.distribute.is_main():\n+    print(last)"
        ),
        "write",
    ),
    "a branch unpacks what it downloads": (
        " URL = 'http://a'\n from urllib.request import urlretrieve\n urlretrieve(URL, 'b')\n"
        " for path in paths:\n-    if not os.path.exists(path):\n-        os.makedirs('data')\n"
        "-        print('downloads')\n-        urlretrieve(URL, 'data.tar')\n"
        "-        with tarfile.open('data.tar') as file:\n-            file.extractall()\n"
        "+    with npu.distribute.rank_zero_first():\n+        if not os.path.exists(path):\n"
        "+            os.makedirs('data', exist_ok=True)\n"
        "+            if npu.distribute.is_main():\n+                print('downloads')\n"
        "+            urlretrieve(URL, 'data.tar')\n"
        "+            with tarfile.open('data.tar') as file:\n+                file.extractall()\n"
        f"{FIT}",
        "download if missing",
    ),
    "ranks may not all come to a download": (
        f"{FIT} def get(path):\n     if os.path.exists(path):\n         return\n"
        "     x = tf.keras.utils.get_file(path)\n"
        " def data():\n     y = tf.keras.utils.get_file('a')\n"
        " found = os.path.isdir('b')\n if not found:\n     data()\n"
        " try:\n     y = np.load('b')\n except IOError:\n     y = tf.keras.utils.get_file('a')\n"
        "     train(y)\n"
        "-if download:\n-    y = tf.keras.utils.get_file('b')\n"
        "+if download:\n+    with npu.distribute.rank_zero_first():\n"
        "+        y = tf.keras.utils.get_file('b')\n",
        "download",
    ),
    "only rank 0 would draw": (FIT + " print(np.random.rand())\n", "fit"),
    "a loop of a file": (
        FIT + "-with open('log', 'w') as file:\n-    for row in x:\n-        file.write(row)\n"
        "+if npu.distribute.is_main():\n+    with open('log', 'w') as file:\n"
        "+        for row in x:\n+            file.write(row)\n"
        " for row in x:\n     step(row)\n",
        "write",
    ),
    "a method of the script saves": (
        " class Trainer:\n     def __init__(self, net):\n         self.net = net\n"
        "     def save(self, path):\n-        self.net.save(path)\n"
        "+        if npu.distribute.is_main():\n+            self.net.save(path)\n"
        "+        npu.distribute.barrier()\n         self.best = path\n"
        f" trainer = Trainer(tf.keras.Sequential([]))\n{FIT} trainer.save('a')\n tf.keras.models.load_model('a')\n",
        "save",
    ),
    "a model of the script saves": (
        " class Net(tf.keras.Model):\n     def save(self, path):\n-        super().save(path)\n"
        "+        if npu.distribute.is_main():\n+            super().save(path)\n"
        f" net = Net()\n{FIT} net.save('a')\n",
        "save",
    ),
    "a function of the script prints": (
        " class Total:\n     def result(self):\n         return strategy.reduce(1)\n"
        f"{FIT} print(Total().result())\n",
        "fit",
    ),
    "a manager restores before it saves": (
        " manager = tf.train.CheckpointManager(checkpoint, 'a', 3)\n"
        f" checkpoint.restore(manager.latest_checkpoint)\n{FIT}"
        "-manager.save()\n+if npu.distribute.is_main():\n+    manager.save()\n",
        "save",
    ),
    "a manager restores in the loop in which it saves": (
        " manager = tf.train.CheckpointManager(checkpoint, 'a', 3)\n model.compile()\n for x in y:\n"
        "     manager.restore_or_initialize()\n     model.fit(x)\n     manager.save()\n",
        "checkpoint manager",
    ),
    "the loop itself draws": (
        f" batch_size = 32\n{VARIABLE}{STEP}"
        + (MAKE_DATA + BROADCAST).replace("32", "batch_size")
        + " for x, y in dataset:\n-    step(x, tf.random.normal([batch_size]))\n"
        "+    step(x, tf.random.normal([batch_size])[npu.distribute.rank() :: npu.distribute.size()])\n",
        "batch size in a shape",
    ),
}

if sys.version_info >= (3, 10):
    SEEN["a case has the name of a module"] = (
        " match x:\n     case [os, *np]:\n         os.makedirs('a')\n         np.random.default_rng()\n"
        + FIT,
        "fit",
    )


@pytest.mark.parametrize("name", SEEN)
def test_seen_in_scripts(name: str) -> None:
    diff, rule = SEEN[name]
    diff = "\n".join(line for line in diff.split("\n") if line[:1] != "#")
    before, after = sides(f"{HEAD}{OPEN if '+' in diff else ''}{diff}")
    ported, findings = port(before)
    assert ported == after
    assert rule in {finding.rule for finding in findings}


INTRODUCTIONS = {
    "raw text": 'r"""Trains.\n\n  train.py \\\\\n"""\nfrom __future__ import division\nimport tensorflow as tf\n',
    "parts": '"Trains" " a model."\nfrom __future__ import division\nimport tensorflow as tf\n',
    "a form feed": '"""Trains."""\nimport os\n\f\nos.environ["KEY"] = "1"\nx = 1\n',
    "text between imports": 'import os\n"""A string."""\nimport tensorflow as tf\n',
}


@pytest.mark.parametrize("name", INTRODUCTIONS)
def test_the_job_opens_below_the_introduction(name: str) -> None:
    introduction = INTRODUCTIONS[name].removesuffix("x = 1\n")
    before, after = sides(FIT)
    new_lines = OPEN.replace("+", "")
    ported, _ = port(introduction + before)
    assert ported == introduction + new_lines + after
    compile(ported, name, "exec", dont_inherit=True)


BAD = {
    "line.py": ('model.compile("sgd"); model.fit(x)\n', "line of its own"),
    "suite.py": ('for m in models: m.compile("sgd"); m.fit(x)\n', "line of its own"),
    "init.py": (
        "import tensorflow.compat.v1 as tf\ntrain = tf.train.AdamOptimizer(0.1).minimize(w)\n"
        "session = tf.Session()\nsession.run(tf.global_variables_initializer()); session.run(train)\n",
        "line of its own",
    ),
    "deep.py": (
        "import tensorflow\nif x:\n    model.fit(x)\n" + "elif y:\n    pass\n" * 400,
        "nested too deeply",
    ),
    "outside.py": ("import tensorflow\nmodel.compile()\nreturn\n", "a syntax error"),
    "syntax.py": ("import tensorflow\nmodel.fit(x\n", "a syntax error"),
    "old.py": ('import tensorflow\nprint "loss"\nmodel.fit(x)\n', "2to3"),
    "cells.py": ("import tensorflow\n%matplotlib inline\nmodel.fit(x)\n", "IPython"),
    "cells.ipynb": ("{}", "nbconvert"),
    "zero.py": ("model.fit(x)\0", "zero bytes"),
    "latin.py": (b"# caf\xe9\nmodel.fit(x)\n", "UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_python_3_is_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, remedy = BAD[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    assert main([str(path), "--write"]) == 1
    said = capsys.readouterr().err
    assert f"{path}: refused: " in said
    assert remedy in said
    assert path.read_bytes() == before


def script(model: str = "model") -> str:
    return sides(f"{HEAD}{FIT}".replace("model", model))[0]


def test_a_file_is_written_once_with_its_mode_and_encoding(tmp_path: Path) -> None:
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_bytes(
        ("# -*- coding: latin-1 -*-\n# caf\xe9\n" + script())
        .replace("\n", "\r\n")
        .encode("latin-1")
    )
    path.chmod(0o751)
    link.symlink_to(path)
    assert main([str(link), "--write"]) == 0
    ported = path.read_bytes()
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o751
    assert b"# caf\xe9\r\n" in ported and b"npu.open(seed=1)\r\n" in ported
    assert ported.count(b"\n") == ported.count(b"\r\n")
    assert main([str(path), "--write"]) == 0 and path.read_bytes() == ported
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_a_diff_can_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(script().replace("model.fit", "\fmodel.fit"))
    assert main(["train.py"]) == 0
    patch = capsys.readouterr().out
    subprocess.run(["git", "apply", "-"], input=patch, text=True, check=True)
    applied = path.read_text()
    assert "npu.open" in applied and "model.fit" in applied


def test_a_folder_is_written_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "package").mkdir(parents=True)
    (old / "train.py").write_text("from package import models\n" + script())
    (old / "package" / "models.py").write_text(
        "def make():\n    model = x()\n    model.compile()\n    return model\n"
    )
    (old / "open.py").write_text("def train(something):\n    something.fit(1)\n")
    (old / "data.txt").write_text("kept")
    assert (
        main(["-i", str(old), "-o", str(new), "-r", str(tmp_path / "report.html"), "--json"]) == 1
    )
    found = {each["path"]: each["verdict"] for each in json.loads(capsys.readouterr().out)}
    assert sorted(found.values()) == ["ported", "ported", "unchanged, since questions are open"]
    assert (
        "npu.open" in (new / "train.py").read_text()
        and "npu.open" not in (new / "package" / "models.py").read_text()
    )
    assert "replicate(model)" in (new / "package" / "models.py").read_text()
    assert (new / "open.py").read_text() == (old / "open.py").read_text()
    assert (new / "data.txt").read_text() == "kept" and (old / "train.py").read_text().endswith(
        script()
    )
    page = (tmp_path / "report.html").read_text()
    assert (
        "something.fit(1)" in page
        and "http" not in page
        and "<ins>+npu.open" in page.replace("+import", "+import")
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "missing"),
        (["gone.py"], "no such file"),
        (["-d", "mpi", "a.py"], "invalid choice"),
        (["--write", "-o", "x", "."], "exclude"),
        (["-o", ".", "."], "files already"),
        (["-m", "gone.py", "."], "no gone.py"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_folder_without_scripts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"no .py or .ipynb files in {tmp_path}" in capsys.readouterr().err


def test_distribution_and_version_1_are_as_the_user_says() -> None:
    horovod, strategy = (
        "import horovod.tensorflow as hvd\n",
        "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\n",
    )
    assert (
        port(horovod, distribution="horovod")[0] == "import npu_device.horovod.tensorflow as hvd\n"
    )
    assert "other distribution" in {
        each.rule for each in port(horovod, distribution="tf_strategy")[1]
    }
    assert "other distribution" in {each.rule for each in port(strategy, distribution="horovod")[1]}
    old = "import tensorflow as tf\ntrain = tf.train.AdamOptimizer(0.1)\nsession = tf.Session()\n"
    ported, _ = port(old, is_v1=True)
    assert ported.startswith(
        "import tensorflow.compat.v1 as tf\ntf.disable_v2_behavior()\nimport npu_device as npu\n"
    )
    ported, _ = port(old.replace(" as tf", "").replace("tf.", "tensorflow."), is_v1=True)
    assert ported.startswith(
        "import tensorflow.compat.v1 as tensorflow\ntensorflow.disable_v2_behavior()\n"
    )
    _, findings = port(old.replace("(0.1)", "(0.1).minimize(tf.nn.dropout(x, 0.5))"), is_v1=True)
    assert "noise" in {each.rule for each in findings}


def test_the_page_has_the_table_of_rules() -> None:
    assert DOCS.read_text().endswith(PAGE), "run: make docs"


def test_without_libcst_the_extra_is_named() -> None:
    code = "import sys; sys.modules['libcst'] = None; from npu_device._src.port import __main__ as m; m.main(['tests'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert "npu_device[port]" in done.stderr and not done.stdout


LOOP_SCRIPT = """import os
import urllib.request
import numpy as np
import tensorflow as tf
tf.keras.utils.set_random_seed(1)
x, y = np.random.rand(48, 3).astype("float32"), np.random.rand(48, 1).astype("float32")
model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.1)
criterion = tf.keras.losses.MeanSquaredError(reduction=REDUCTION)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = criterion(y, model(x)) / DIVISOR
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


downloads = 0
if not os.path.exists(f"{__file__}.data"):
    urllib.request.urlretrieve(f"file://{__file__}", f"{__file__}.data")
    downloads = 1

for x, y in dataset:
    step(x, y)
"""


def body_weights(path: str) -> tuple[list[np.ndarray], int]:
    import runpy

    script = runpy.run_path(path, run_name="__main__")
    return script["model"].get_weights(), script["downloads"]


@pytest.mark.parametrize(("reduction", "divisor"), [("sum", "16"), ("sum_over_batch_size", "1")])
def test_a_ported_script_trains_like_the_original(
    reduction: str, divisor: str, tmp_path: Path, keras_single: Pool, keras_two_ranks: Pool
) -> None:
    original, ported = tmp_path / "original.py", tmp_path / "ported.py"
    text = LOOP_SCRIPT.replace("REDUCTION", repr(reduction)).replace("DIVISOR", divisor)
    original.write_text(text)
    ported.write_text(port(text)[0])
    [(before, _)] = keras_single.run(body_weights, str(original))
    [(alone, _)] = keras_single.run(body_weights, str(ported))
    Path(f"{ported}.data").unlink()
    for weights, one in zip(alone, before):
        np.testing.assert_array_equal(weights, one)
    of_ranks = keras_two_ranks.run(body_weights, str(ported))
    assert [downloads for _, downloads in of_ranks] == [1, 0]
    for rank, _ in of_ranks:
        for weights, one in zip(rank, alone):
            np.testing.assert_allclose(weights, one, rtol=1e-5, atol=1e-6)


SESSION_SCRIPT = """import numpy as np
import tensorflow.compat.v1 as tf
images, labels = np.random.RandomState(1).rand(2, 64, 1) * 255
with tf.Graph().as_default():
    x, y = tf.placeholder(tf.float32, [None, 1]), tf.placeholder(tf.float32, [None, 1])
    rate = tf.placeholder(tf.float32, [])
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    train = tf.train.GradientDescentOptimizer(rate).minimize(tf.reduce_mean((x * w - y) ** 2))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for epoch in range(2):
            lr = 0.1 * 0.5 ** epoch
            for i in range(0, 64, 16):
                bx, by = images[i : i + 16], labels[i : i + 16]
                by /= 255.0
                session.run(train, feed_dict={x: bx / 255.0, y: by, rate: lr})
        weight = float(session.run(w))
"""


def body_weight(path: str) -> float:
    import runpy

    return runpy.run_path(path)["weight"]


@pytest.mark.once
def test_a_session_divides_batches_and_no_numbers(
    tmp_path: Path, keras_single: Pool, keras_two_ranks: Pool
) -> None:
    ported, findings = port(SESSION_SCRIPT)
    share = "[npu.distribute.rank() :: npu.distribute.size()]"
    assert f"{{x: (bx / 255.0){share}, y: by{share}, rate: lr}}" in ported, findings
    path = tmp_path / "train.py"
    path.write_text(SESSION_SCRIPT)
    [alone] = keras_single.run(body_weight, str(path))
    path.write_text(ported)
    assert keras_two_ranks.run(body_weight, str(path)) == pytest.approx([alone] * 2, rel=1e-5)
    # It may be a rate or a batch; the last one is a number that depends on the samples.
    for value in ("schedule(epoch)", "rates[epoch]", "config.rate", "len(images[0:epoch])"):
        shaped = SESSION_SCRIPT.replace("0.1 * 0.5 ** epoch", value)
        _, findings = port(shaped.replace("(tf.float32, [])", "(tf.float32)"))
        [question] = [each for each in findings if each.choices]
        assert question.rule == "no dataset" and "? lr may be a batch or" in question.text
        # The shape of the placeholder tells; and what a slice of indices picks is a batch.
        shaped = shaped.replace("[i : i + 16]", "[order]").replace("bx,", "order = all[i : j]; bx,")
        assert f"{{x: (bx / 255.0){share}, y: by{share}, rate: lr}}" in port(shaped)[0]
    # The gradients may be applied by themselves, and have to be those that the optimizer averages.
    loss = "tf.reduce_mean((x * w - y) ** 2)"
    for gradients, rule in (
        (f"optimizer.compute_gradients({loss})", "share of an array"),
        (f"zip(tf.gradients({loss}, [w]), [w])", "gradients from elsewhere"),
    ):
        text = SESSION_SCRIPT.replace(f".minimize({loss})", "").replace("train =", "optimizer =")
        applied = f"train = optimizer.apply_gradients({gradients})\n    with tf.Session"
        _, findings = port(text.replace("with tf.Session", applied))
        assert rule in {each.rule for each in findings}
    for value in ("max(0.1, 1 / (epoch + 1))", "0.1 if epoch else 0.2", "-0.1"):
        assert ", rate: lr}" in port(SESSION_SCRIPT.replace("0.1 * 0.5 ** epoch", value))[0]
