"""How many files of the package one training step of a replicated model passes through, from Keras's call to the
reduction of the gradients, and how deep the calls are there.

npurun -n 2 benchmarks/road.py    (SHOW=1 prints the files, and the calls at the reduction)
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import numpy as np

import npu_device as npu

npu.open().as_default()

import tensorflow as tf  # noqa: E402 - after npu.open()

ROOT = os.path.dirname(npu.__file__) + "/_src/"
BEGIN, END = ("training/fit/function.py", "__call__"), ("gradients/reduction.py", "reduce_list")

ran: list[str] = []
stack: list[str] = []
on = False


def place(frame: FrameType) -> tuple[str, str]:
    """Return the file, below the package's source, and the function of a frame."""
    file = frame.f_code.co_filename
    return (file[len(ROOT) :] if file.startswith(ROOT) else "", frame.f_code.co_name)


def profile(frame: FrameType, event: str, argument: Any) -> None:
    """Note the files of the package that are called between ``BEGIN`` and ``END``."""
    global on
    if event != "call" or not place(frame)[0]:
        return
    if place(frame) == BEGIN:
        ran.clear()
        on = True
    if place(frame) == END and on:
        on = False
        caller: FrameType | None = frame.f_back
        stack[:] = []
        while caller is not None and place(caller) != BEGIN:
            if place(caller)[0]:
                stack.append(":".join(place(caller)))
            caller = caller.f_back
        stack.append(":".join(BEGIN))
    elif on:
        ran.append(place(frame)[0])


def main() -> None:
    """Train two steps eagerly, and count in the second one."""
    keras = tf.keras
    inputs = keras.Input([6])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs)))
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    model = npu.distribute.replicate(model)
    x, y = np.ones([8, 6], np.float32), np.ones([8, 1], np.float32)
    model.train_on_batch(x, y)
    sys.setprofile(profile)
    model.train_on_batch(x, y)
    sys.setprofile(None)
    if npu.distribute.is_main():
        files = sorted({file for file in ran if file.startswith("training/")})
        on_stack = list(
            dict.fromkeys(line.partition(":")[0] for line in reversed(stack) if line.startswith("training/"))
        )
        print(f"{len(files)} files of training/ run before the reduction, {len(on_stack)} of them call it")
        print(f"{len(stack)} calls of the package are open at the reduction")
        if os.environ.get("SHOW"):
            print("\n".join(["run:", *files, "open:", *reversed(stack)]))


main()
