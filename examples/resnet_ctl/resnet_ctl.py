"""Trains the model garden's ResNet-50 with its custom training loop, on one device or on many ranks.

    python resnet_ctl.py --data_dir build/digits
    npurun -n 2 resnet_ctl.py --data_dir build/digits

Flags and loop are the official ones (`--helpfull` lists them); the defaults suit the digits of
`make_digits_imagenet.py`. The three additions of the port are in `ported_runnable.py`.
"""

from __future__ import annotations

import os
from typing import Any

# The official modules are written for Keras 2, which has to be chosen before TensorFlow is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
# TensorFlow's notes to developers would bury the run's own lines.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags, logging
from official.legacy.image_classification.resnet import (
    common,
    resnet_ctl_imagenet_main,
    resnet_runnable,
)
from official.utils.flags import core as flags_core
from official.utils.misc import model_helpers
from ported_runnable import PortedResnetRunnable
from records import fit_official_constants
from report import report

import npu_device as npu


def define_flags() -> None:
    """Define the official flags, with defaults for four short epochs of the digits."""
    common.define_keras_flags()
    flags_core.set_defaults(
        data_dir="build/digits",
        model_dir="build/resnet_ctl",
        batch_size=64,
        train_epochs=4,
        steps_per_loop=11,
        log_steps=11,
        distribution_strategy="off",
    )
    refusals = {
        "distribution_strategy": (
            "off",
            "the ranks of npu_device take its place: start more of them with npurun",
        ),
        "single_l2_loss_op": (False, "the ported step takes the L2 term from the layers"),
        "enable_xla": (False, "XLA cannot compile a step that waits for other ranks"),
    }
    for name, (only, reason) in refusals.items():
        flags.register_validator(
            name, lambda value, only=only: value == only, f"must be {only}: {reason}"
        )


def train(flags_obj: Any) -> PortedResnetRunnable:
    """Run the official training and evaluation with the ported runnable, and return that."""
    made = []

    def make(*arguments: Any) -> PortedResnetRunnable:
        made.append(PortedResnetRunnable(*arguments))
        return made[-1]

    # The official run() looks the class up in this module; it has no argument for another one.
    resnet_runnable.ResnetRunnable = make
    resnet_ctl_imagenet_main.run(flags_obj)
    return made[-1]


def main(_: list[str]) -> None:
    """Open the device before TensorFlow does anything, then train, evaluate and report."""
    device = npu.open()
    device.as_default()
    flags_obj = flags.FLAGS
    fit_official_constants(flags_obj.data_dir)
    if device.workers_num > 1:
        # Each rank keeps its own logs and checkpoints, so that no two write the same file.
        flags_obj.model_dir = os.path.join(flags_obj.model_dir, f"rank-{device.worker_id}")
    model_helpers.apply_clean(flags_obj)
    report(train(flags_obj))


if __name__ == "__main__":
    define_flags()
    # orbit prints its progress as well as logging it; --verbosity=0 brings the log back.
    logging.set_verbosity(logging.WARNING)
    app.run(main)
