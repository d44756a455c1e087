"""The first-step check of a replicated model: what can't be divided is named before the first step, with the remedy."""

from __future__ import annotations

import contextlib
import io
import os
import random
from typing import Any

import numpy as np
import pytest
from heard import warnings_of_package
from pool import Pool

import npu_device as npu


def body_check(kind: str) -> tuple[str, str, list[str]]:
    """Return the error of a ``fit``, what the statement at the start says of the check, and the warnings."""
    from first_step_models import model_and_data

    model, data = model_and_data(kind)
    error, printed = "", io.StringIO()
    with warnings_of_package() as said, contextlib.redirect_stderr(printed):
        try:
            npu.distribute.replicate(model).fit(**data)
        except ValueError as raised:
            error = str(raised)
    lines = [line for line in printed.getvalue().splitlines() if "first step" in line]
    return error, lines[0].split("first step")[1].strip() if lines else "", said


@pytest.mark.parametrize(
    "kind", ["noise", "gathered", "mean", "own noise", "own function", "gathered bank", "clips reduced"]
)
def test_what_can_be_divided_is_checked(several_keras_ranks: Pool, kind: str) -> None:
    found = several_keras_ranks.run(body_check, kind)
    assert found[0] == ("", "checked", [])
    assert all(each == ("", "", []) for each in found[1:])


ERRORS = {
    "per sample": ["adds up what its samples give", "dense", "reduce_mean", "times too small"],
    "sum": ["adds up what its samples give", "dense", "reduction='sum'"],
    "added sum": ["a loss that a layer adds", "first_step_models.py, line", "self.add_loss(1e-4"],
    "local bank": ["bank", "takes values of the samples", "# set here", "npu.distribute.all_gather"],
    "by hand": ["kernel", "without an optimizer", "variable.assign(", "npu.distribute.all_reduce(gradients)"],
    "pairs": ["first axis", "data: shape (2, 12, 6)", "npu.distribute.divided"],
    "size in a layer": ["fixed batch size", "data[0]: shape (12, 6)", "npu.distribute.divided"],
}


@pytest.mark.parametrize(
    "kind",
    [
        "per sample",
        "local bank",
        "fixed size, local bank",
        "sum",
        "added sum",
        "by hand",
        "pairs",
        "pairs of any number",
        "size in a layer",
    ],
)
def test_errors(keras_two_ranks: Pool, kind: str) -> None:
    for rank, (error, _, said) in enumerate(keras_two_ranks.run(body_check, kind)):
        assert error.startswith(f"rank {rank}: ")
        for part in ERRORS[kind.replace(" of any number", "").replace("fixed size, ", "")]:
            assert part in error
        assert said == []


WARNINGS = {
    "contrastive": ["gradient of 5 samples", "# samples meet here", "dense", "npu.distribute.all_gather"],
    "mixing operation": ["gradient of 5 samples", "Samples first meet in", "npu.distribute.all_gather"],
    "valid steps": ["isn't a mean", "ignore_class"],
    "clips": ["gradients, _ = tf.clip_by_global_norm(gradients, 99.0)", "npu.distribute.all_reduce(gradients)"],
    "ragged": ["isn't a mean", "time_distributed"],
    "counter": ["seen", "count steps, not samples", "self.seen.assign_add("],
}


@pytest.mark.parametrize(
    "kind",
    [
        "contrastive",
        "clips",
        "mixing operation",
        "valid steps",
        "counter",
        pytest.param("ragged", marks=pytest.mark.only_keras("2")),
    ],
)
def test_warnings(keras_two_ranks: Pool, kind: str) -> None:
    found = keras_two_ranks.run(body_check, kind)
    assert [(error, statement) for error, statement, _ in found] == [("", "checked, with a warning")] + [("", "")] * (
        keras_two_ranks.size - 1
    )
    assert [len(said) for _, _, said in found] == [1] + [0] * (keras_two_ranks.size - 1)
    for part in WARNINGS[kind]:
        assert part in found[0][2][0]


STATEMENTS = {
    "functional": "needs no check: the layers, the loss and the step are Keras's own",
    "eager": "not checked: the step runs eagerly",
    "shuffles": "not checked: the step draws random numbers",
    "python": "not checked: the step runs PyFunc",
    "fixed size, gathered bank": "not checked: the step can't run on a few samples",
    "draws in a branch": "not checked: the step draws random numbers in a branch or a loop",
    "applies in a branch": "not checked: the step applies gradients in a branch or a loop",
}


@pytest.mark.parametrize("kind", list(STATEMENTS))
def test_what_cannot_be_checked(keras_two_ranks: Pool, kind: str) -> None:
    error, statement, said = keras_two_ranks.run(body_check, kind)[0]
    assert (error, said) == ("", [])
    assert statement.startswith(STATEMENTS[kind])


def body_with_and_without(kind: str) -> Any:
    """Return the random states and the weights after trainings with the check, and without."""
    from first_step_models import model_and_data

    found = []
    for setting in ("on", "off"):
        os.environ["NPU_DEVICE_FIRST_STEP_CHECK"] = setting
        try:
            model, data = model_and_data(kind)
            npu.distribute.replicate(model).fit(**data, epochs=2)
            states = (random.random(), float(np.random.random()))
            found.append([*states, *(np.asarray(value) for value in model.variables)])
        finally:
            del os.environ["NPU_DEVICE_FIRST_STEP_CHECK"]
    return found


@pytest.mark.parametrize("kind", ["own noise", "own function"])
def test_the_check_changes_nothing(several_keras_ranks: Pool, kind: str) -> None:
    for with_check, without in several_keras_ranks.run(body_with_and_without, kind):
        for one, other in zip(with_check, without):
            np.testing.assert_array_equal(one, other)
