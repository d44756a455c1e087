"""``npu.distribute.replicate``: N ranks' ``fit``, ``evaluate`` and ``predict`` are those of one process.

Each body runs on one process and on each of several ranks, which begin with other weights and seeds than rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fit_bodies
import fit_step_bodies
import pytest
from pool import Pool
from rank_comparison import compare, same, same_bits


@pytest.mark.parametrize(
    "kind",
    [
        "functional",
        "own step",
        # Those of test_further_trainings_equal_one_process are subclassed and unbuilt, too.
        pytest.param("subclassed", marks=pytest.mark.full),
        pytest.param("unbuilt", marks=pytest.mark.full),
        "loaded",
    ],
)
def test_fit_on_arrays_trains_as_one_process(
    several_keras_ranks: Pool, keras_single: Pool, kind: str, tmp_path: Path
) -> None:
    compare(several_keras_ranks, keras_single, fit_bodies.body_arrays, kind, directory=tmp_path)


@pytest.mark.parametrize(
    "kinds",
    [
        ("dataset", "endless dataset", "generator"),
        ("sample weights", "sequence"),
        pytest.param(("weighted dataset",), marks=pytest.mark.full),
        # Keras 2 refuses it on one process, too.
        pytest.param(("empty validation",), marks=pytest.mark.only_keras("3")),
    ],
    ids=["datasets", "sequences", "weights", "nothing"],
)
def test_fit_on_each_kind_of_data_is_trained_like_one_process(
    keras_two_ranks: Pool, keras_single: Pool, kinds: tuple[str, ...]
) -> None:
    compare(keras_two_ranks, keras_single, fit_bodies.body_data, *kinds)


@pytest.mark.parametrize(
    "kind",
    [
        "steps per execution, clipping",
        pytest.param("accumulation", marks=pytest.mark.only_keras("3")),
        pytest.param("weighted mean", marks=pytest.mark.only_keras("3")),
        pytest.param("loss scale", marks=pytest.mark.only_keras("2")),
        pytest.param("decides in Python", marks=pytest.mark.only_keras("2")),
        "eagerly, sum",
        "words, average",
        "words, clipnorm",
        pytest.param("words, global_clipnorm", marks=pytest.mark.full),
        pytest.param("words, clipvalue", marks=pytest.mark.full),
    ],
)
def test_what_a_script_compiles_is_trained_as_one_process(
    keras_two_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    compare(keras_two_ranks, keras_single, fit_bodies.body_compiled, kind)


@pytest.mark.parametrize("kind", ["masked", "ignored class", "own loss", "synchronised"])
def test_masked_models_train_as_one_process(
    several_keras_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    compare(several_keras_ranks, keras_single, fit_step_bodies.body_masked, kind)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (fit_step_bodies.body_with_the_callback, "unbuilt"),
        (fit_step_bodies.body_with_the_callback, "subclassed"),
        (fit_step_bodies.body_one_optimizer, "batch by batch"),
        (fit_step_bodies.body_sent_as_bytes, "strings and rows in another order"),
        (fit_step_bodies.body_infinite, "traced"),
        (fit_step_bodies.body_infinite, "eagerly"),
    ],
)
def test_further_trainings_equal_one_process(
    keras_two_ranks: Pool, keras_single: Pool, body: Any, kind: str
) -> None:
    compare(keras_two_ranks, keras_single, body, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("keras2", marks=pytest.mark.only_keras("2")),
        pytest.param("keras3", marks=pytest.mark.only_keras("3")),
    ],
)
def test_metrics_of_a_replica_are_like_those_of_one_process(
    keras_two_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    compare(keras_two_ranks, keras_single, fit_bodies.body_metrics, kind)


def test_predict_returns_what_one_process_does(keras_two_ranks: Pool, keras_single: Pool) -> None:
    compare(keras_two_ranks, keras_single, fit_bodies.body_outputs)
    for error in keras_two_ranks.run(fit_bodies.body_outputs_that_vary):
        assert "output[kept] has no fixed number of rows" in error and "What to do: " in error


@pytest.mark.once
def test_the_callback_chooses_the_rank_that_sends(several_keras_ranks: Pool) -> None:
    results = several_keras_ranks.run(fit_step_bodies.body_from_another_rank)
    same_bits(results[-1][0], *(weights for _, weights in results))


@pytest.mark.once
def test_data_divided_by_the_script_trains_as_one_process(
    several_keras_ranks: Pool, keras_single: Pool
) -> None:
    compare(several_keras_ranks, keras_single, fit_bodies.body_divided)


@pytest.mark.parametrize("kind", ["shuffle", "smaller", "smaller, eagerly"])
def test_another_order_on_each_rank_becomes_rank_0s(
    keras_two_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    [(alone, _)] = keras_single.run(fit_bodies.body_unshuffled, kind)
    (first, said), (second, _) = keras_two_ranks.run(fit_bodies.body_unshuffled, kind)
    same([first, second], [alone, alone])
    assert ["Rank 0's batches are sent to all" in text for text in said] == [True]


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_rows_in_another_order_become_rank_0s(
    keras_two_ranks: Pool, keras_single: Pool, kind: str
) -> None:
    [alone] = keras_single.run(fit_bodies.body_unshuffled_rows, kind)
    same(keras_two_ranks.run(fit_bodies.body_unshuffled_rows, kind), [alone, alone])


def test_logs_that_are_no_mean_are_named(keras_two_ranks: Pool) -> None:
    for rank, found in enumerate(keras_two_ranks.run(fit_step_bodies.body_logs)):
        assert found["number"] == [0.5]  # the mean
        assert "called reset_state of its metric 'loss'" in found["reset"]
        assert "return tensors from the step" in found["value"]
        said = [
            "computes 'perplexity' from a metric's result" in text for text in found["computed"]
        ]
        assert said == [True] * (rank == 0)


@pytest.mark.parametrize("kind", ["shard", "batch"])
def test_other_data_on_each_rank_is_an_error(keras_two_ranks: Pool, kind: str) -> None:
    for error, _ in keras_two_ranks.run(fit_bodies.body_unshuffled, kind):
        assert "the ranks were given different data" in error
        assert "rank 1 on host" in error
        assert (
            f"first batch of {8 if kind == 'batch' else 16} samples" in error
            and "different batch sizes" in error
        )
        assert (
            "npu.open(seed=1) right after the imports" in error
            and "npu.distribute.divided(dataset)" in error
        )


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("train", 2),
        ("validation", 1),
        ("evaluate", 2),
        pytest.param("predict", 1, marks=pytest.mark.full),
        ("none", 2),
    ],
)
def test_batches_that_differ_later_are_told(keras_two_ranks: Pool, kind: str, steps: int) -> None:
    (error, said, weights), other = keras_two_ranks.run(fit_bodies.body_later_batches, kind, steps)
    assert weights == other[2]
    different = [
        text for text in said if "not the same on all ranks; only the first batches were" in text
    ]
    if kind in ("train", "validation"):
        data = "training" if kind == "train" else "validation"
        assert (
            len(different) == 1 and f"the {data} data were" in different[0]
        )  # rank 0's were sent afterwards
        assert (
            "From now on rank 0's batches are sent to all" in different[0]
            and "rank 1 on host" in different[0]
        )
    else:
        assert different == []
    for text in (error, other[0]):
        assert ("only the first batches were" in text) is (kind in ("evaluate", "predict"))


@pytest.mark.once
def test_a_call_on_rank_0_only_is_named(keras_two_ranks: Pool, tmp_path: Path) -> None:
    """What the ranks exchange for it must not be taken for what they exchange after an epoch."""
    for error, _ in keras_two_ranks.run(
        fit_bodies.body_callback_of_rank_0, "predicts", str(tmp_path)
    ):
        assert "They differ in: purpose." in error
        assert "fit_bodies.py" in error and "(predict)" in error


@pytest.mark.once
def test_a_learning_rate_that_rank_0_changes_alone_is_an_error(
    keras_two_ranks: Pool, tmp_path: Path
) -> None:
    for error, _ in keras_two_ranks.run(fit_bodies.body_callback_of_rank_0, "rate", str(tmp_path)):
        assert "different learning rates at the end of an epoch" in error
        assert "rank 0 on host node0: 0.001\n  rank 1 on host node0: 0.01\n" in error


@pytest.mark.parametrize("kind", ["backup", "auto"])
def test_what_one_rank_may_do_alone(
    keras_two_ranks: Pool, keras: str, kind: str, tmp_path: Path
) -> None:
    if kind == "auto" and keras == "3":
        pytest.skip("Keras 3 doesn't choose steps_per_execution itself")
    (error, weights), other = keras_two_ranks.run(
        fit_bodies.body_callback_of_rank_0, kind, str(tmp_path)
    )
    assert error == ""
    assert (error, weights) == other


def test_a_backup_of_all_epochs_is_everybodys(keras_two_ranks: Pool, tmp_path: Path) -> None:
    # Only rank 0 reads it, and no step is left that would build the optimizers of the others.
    outcome, other = keras_two_ranks.run(fit_bodies.body_complete_backup, str(tmp_path))
    assert outcome == other
    assert outcome[0] == {}


@pytest.mark.once
def test_divided_data_that_are_the_same_are_named(keras_two_ranks: Pool) -> None:
    (_, said), _ = keras_two_ranks.run(fit_bodies.body_unshuffled, "not divided")
    assert ["ranks 0, 1 began with the very same batch" in text for text in said] == [True]


def test_what_is_replaced_is_listed(keras_two_ranks: Pool) -> None:
    names, text = keras_two_ranks.run(fit_step_bodies.body_replaced)[0]
    expected = {
        "train_step",
        "make_test_function",
        "fit",
        "save",
        "apply_gradients",
        "call",
        "add_loss",
    }
    assert {*expected, "update_state", "result", "reset_state", "skip"} <= set(names)
    assert [name for name in names if f"``{name}``" not in text] == []


def test_a_step_that_fails_as_it_starts_replaces_nothing(keras_two_ranks: Pool) -> None:
    for outcome in keras_two_ranks.run(fit_step_bodies.body_failing_start):
        assert outcome == ("RuntimeError: broken", set(), set())


def test_a_replication_that_fails_replaces_nothing(keras_two_ranks: Pool) -> None:
    for errors, left, error, replaced in keras_two_ranks.run(
        fit_step_bodies.body_failing_replication
    ):
        assert (errors, left) == (["RuntimeError: broken"] * 2, set())
        # A setting of a layer that is called like a method isn't one.
        assert error == ""
        assert {"fit", "train_step", "save", "_npu_replica"} <= replaced
