"""``npu.train.FitCheckpoint``: a ``fit`` that was interrupted goes on to the same bits, or says that it doesn't."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import fit_checkpoint_bodies as bodies
import job
import pytest
from launcher import npurun
from pool import Pool
from rank_comparison import same_bits

pytestmark = pytest.mark.slow


def check(ranks: Pool, kind: str, directory: Path) -> None:
    results = ranks.run(bodies.body_same_bits, str(directory / "fit"), kind)
    if kind != "own":  # whose moving averages are those of each rank
        same_bits(*(rank["whole"]["values"] for rank in results))
    for place, rank in enumerate(results):
        whole, parts, ended = rank["whole"], rank["parts"], rank["ended"]
        assert (parts["not_kept"], parts["warnings"]) == ((), [])
        same_bits(whole["values"], parts["values"])
        epochs = list(parts["logs"])
        assert list(whole["logs"]) == [0, 1, 2]
        # A signal takes some of the short steps to reach all ranks.
        assert (
            epochs == [2]
            if kind == "dataset"
            else epochs == [1, 2] or (epochs == [2] and kind == "repeated")
        )
        assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in epochs}
        if ended is not None:
            same_bits(whole["values"], ended["values"])
            assert (ended["not_kept"], list(ended["logs"])) == ((), [2])
            assert ["had ended: its last state" in text for text in ended["warnings"]] == [True] * (
                place == 0
            )


@pytest.mark.parametrize(
    "kind", ["dataset", pytest.param("repeated", marks=pytest.mark.full), "own", "pipeline"]
)
def test_fit_goes_on_to_the_same_bits(keras_two_ranks: Pool, kind: str, tmp_path: Path) -> None:
    check(keras_two_ranks, kind, tmp_path)


def test_fit_with_arrays_on_a_single_device(single: Pool, tmp_path: Path) -> None:
    check(single, "arrays", tmp_path)


@pytest.mark.parametrize("kind", ["small", pytest.param("small, steps", marks=pytest.mark.full)])
def test_epochs_that_begin_alike_are_told_apart(single: Pool, kind: str, tmp_path: Path) -> None:
    [result] = single.run(bodies.body_alike, str(tmp_path / "fit"), kind)
    whole, parts = result["whole"], result["parts"]
    assert (parts["not_kept"], parts["warnings"], list(parts["logs"])) == ((), [], [1, 2])
    same_bits(whole["values"], parts["values"])
    assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in (1, 2)}


@pytest.mark.parametrize("kind", ["parts of a pass", "split", "repeated"])
def test_a_later_epoch_goes_on_to_the_same_bits(
    keras_single: Pool, keras: str, kind: str, tmp_path: Path
) -> None:
    """Of epochs that are one pass over the data together; beside validation on the same shuffled dataset; and where a
    callback trains on other batches.
    """
    if (kind, keras) == ("parts of a pass", "2"):
        pytest.skip("tf-keras ends the training with the first pass")
    [result] = keras_single.run(bodies.body_second_epoch, str(tmp_path / "fit"), kind)
    whole, parts = result["whole"], result["parts"]
    assert (parts["not_kept"], parts["warnings"], list(parts["logs"])) == ((), [], [1, 2, 3])
    same_bits(whole["values"], parts["values"])
    assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in (1, 2, 3)}


def test_an_eager_model_that_the_broadcast_callback_builds(
    keras_two_ranks: Pool, tmp_path: Path
) -> None:
    for result in keras_two_ranks.run(bodies.body_second_epoch, str(tmp_path / "fit"), "own", True):
        whole, parts = result["whole"], result["parts"]
        assert (parts["not_kept"], parts["warnings"], list(parts["logs"])) == ((), [], [1, 2, 3])
        same_bits(whole["values"], parts["values"])


def test_a_fit_whose_callback_calls_another_one(keras_single: Pool, tmp_path: Path) -> None:
    [result] = keras_single.run(bodies.body_nested, str(tmp_path / "fit"))
    whole, parts = result["whole"], result["parts"]
    assert (parts["not_kept"], parts["warnings"], list(parts["logs"])) == ((), [], [1, 2])
    same_bits(whole["values"], parts["values"])
    assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in (1, 2)}


@pytest.mark.parametrize("steps", [8, 10])
def test_a_fit_that_a_callback_stops_in_a_step_is_not_over(
    keras_single: Pool, steps: int, tmp_path: Path
) -> None:
    """Within its second epoch, or in the last step of that."""
    [result] = keras_single.run(bodies.body_stopped, str(tmp_path / "fit"), steps)
    whole, parts = result["whole"], result["parts"]
    [text] = result["stopped"]["warnings"]
    assert "stopped this fit in epoch 2" in text and not parts["warnings"]
    same_bits(whole["values"], parts["values"])
    assert parts["logs"][2] == whole["logs"][2]


def test_other_steps_per_execution_than_before_leave_batches_out(
    single: Pool, tmp_path: Path
) -> None:
    [result] = single.run(bodies.body_other_calls, str(tmp_path / "fit"))
    [text] = result["not_kept"]
    assert text.startswith("1 of the batches of epoch 1 are left out")
    assert [warning.endswith(text) for warning in result["warnings"]] == [True]


def test_fits_without_epochs_and_lists_that_do_not_know_theirs(
    keras_single: Pool, tmp_path: Path
) -> None:
    assert keras_single.run(bodies.body_without_epochs, str(tmp_path / "fit")) == [([], [0, 1, 2])]


def test_the_second_of_two_fits_of_a_dataset(keras_single: Pool, tmp_path: Path) -> None:
    [(whole, parts)] = keras_single.run(bodies.body_two_fits, str(tmp_path / "fit"))
    [text] = parts["warnings"]
    assert "had ended: its last state" in text
    same_bits(whole["weights"], parts["weights"])
    assert parts["logs"] == whole["logs"]


def test_endless_data_of_which_the_last_call_takes_more_than_an_epoch(
    keras_single: Pool, tmp_path: Path
) -> None:
    [result] = keras_single.run(bodies.body_endless, str(tmp_path / "fit"))
    whole, parts = result["whole"], result["parts"]
    assert (parts["not_kept"], parts["warnings"], list(parts["logs"])) == ((), [], [2])
    same_bits(whole["values"], parts["values"])
    assert parts["logs"] == {2: whole["logs"][2]}


def test_steps_per_execution_another_order_and_other_fits(two_ranks: Pool, tmp_path: Path) -> None:
    results = two_ranks.run(bodies.body_others, str(tmp_path / "fit"))
    for result in results:
        whole, parts = result["whole"], result["parts"]
        assert result["there"] == ["latest.json", "step-00000010", "step-00000013", "step-00000015"]
        same_bits(whole["values"], parts["values"])
        assert parts["logs"] == {epoch: whole["logs"][epoch] for epoch in (1, 2)}
        told = ("is not that of a fit", "is from epoch 3, but this fit has 1", "other metrics")
        for text, says in zip(result["errors"], told):
            assert text.startswith("CheckpointError") and says in text and "What to do: " in text
    for place, says in enumerate(
        ("rank(s) 0, 1 read a different first batch", "its data come from Python")
    ):
        for result in results:
            [text] = result["told"][place]["not_kept"]
            assert says in text and "What to do: " in text
            assert list(result["told"][place]["logs"]) == [1, 2]
        [warning] = [
            text for text in results[0]["told"][place]["warnings"] if "resumed in epoch 2" in text
        ]
        assert says in warning


def test_a_fit_after_one_that_an_error_ended(keras_single: Pool, tmp_path: Path) -> None:
    keras_single.run(bodies.body_interrupted, str(tmp_path / "fit"))


def test_batches_that_are_passed_over_are_dropped(single: Pool, tmp_path: Path) -> None:
    single.run(bodies.body_large_data, str(tmp_path / "fit"))


ALL_STEPS = ["latest.json", *(f"step-{step:08}" for step in (3, 5, 6, 9, 10))]


@pytest.mark.parametrize(
    "kind", ["other order", pytest.param("other order later", marks=pytest.mark.full)]
)
def test_a_train_function_that_is_made_anew(
    keras_two_ranks: Pool, kind: str, tmp_path: Path
) -> None:
    """In the first step and by a callback, or after the first epoch, since rank 0's batches are sent from then on."""
    results = keras_two_ranks.run(bodies.body_made_anew, str(tmp_path / "fit"), kind)
    assert [files for files, _ in results] == [ALL_STEPS, ALL_STEPS]
    _, warnings = results[0]
    told = ["ank 0's batches are sent to all" in text for text in warnings]
    assert told and all(told)


@pytest.mark.parametrize("kind", ["dataset", "within"])
def test_a_train_function_that_a_callback_makes_anew(
    keras_single: Pool, kind: str, tmp_path: Path
) -> None:
    [found] = keras_single.run(bodies.body_made_anew, str(tmp_path / "fit"), kind)
    assert found == (ALL_STEPS, [])


def test_a_killed_rank_and_a_preemption_under_npurun(tmp_path: Path) -> None:
    """The job ends with the second, and goes on to the same bits when it is started again. Ranks have a shell around
    them, which a signal would end at once.
    """
    command = [bodies.__file__, str(tmp_path)]
    restarts = ("--max-restarts", "1", "--restart-backoff", "0.1")
    wrapper = ("sh", "-c", f'{sys.executable} "$0" "$@"; exit $?')
    done = npurun("-n", "2", *restarts, *wrapper, *command, "interrupted", limit=120)
    told = done.stderr.decode()
    assert done.returncode == 75 and re.search(
        r"restart 1 of 1 .*rank 1 on host .*exit code 137", told
    ), told
    assert "SIGTERM: asking 2 ranks to stop" in told
    assert re.search(r"stopped on request at step \d+, resumable", told), told
    assert "Traceback" not in told.partition("restart 1 of 1")[2]
    again = job.finish(job.start_command(tmp_path, 2, [*command, "whole"]), 120)
    assert [ended.code for ended in again] == [0, 0], again
