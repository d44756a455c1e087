"""``npu.train.JobCheckpoint``: what is saved is whole, restored on all ranks, and goes on to the same bits."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import checkpoint_bodies as bodies
import job
import numpy as np
import pytest
from pool import Pool
from rank_comparison import same_bits


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


@pytest.mark.once
@pytest.mark.slow
def test_a_loop_goes_on_to_the_same_bits(keras_two_ranks: Pool, tmp_path: Path, keras: str) -> None:
    """With a common directory; under tf-keras each rank has a disk of its own, and the last one's is lost."""
    disks = keras == "2"
    whole = keras_two_ranks.run(bodies.body_loop, str(tmp_path / "whole"), bodies.STEPS, disks)
    keras_two_ranks.run(bodies.body_loop, str(tmp_path / "parts"), 5, disks)
    shutil.copytree(tmp_path / "parts", tmp_path / "swapped")
    resumed = keras_two_ranks.run(bodies.body_loop, str(tmp_path / "parts"), bodies.STEPS, disks)
    for one, other in zip(whole, resumed):
        assert (one["start"], other["start"]) == (0, 4)
        assert other["not_kept"] == () and other["warnings"] == []
        same_bits(one["weights"], other["weights"])
        assert one["losses"][4:] == other["losses"]
    assert (
        whole[0]["losses"] != whole[1]["losses"]
    )  # each rank has noise, data and moving averages of its own
    written = tmp_path / "parts" / ("0" if disks else "")
    assert steps_in(written) == ["step-00000004", "step-00000006", "step-00000008"]
    assert json.loads((written / "latest.json").read_text()) == {"step": 8}
    if disks:
        shutil.rmtree(
            tmp_path / "swapped" / "1"
        )  # another machine has taken the place of the last host
        results = keras_two_ranks.run(bodies.body_loop, str(tmp_path / "swapped"), 4, disks)
        assert [result["start"] for result in results] == [4] * 2
        assert "what each rank has of its own" in results[0]["warnings"][0]
        same_bits(*(result["weights"] for result in results))


_trained: list[Path] = []


@pytest.fixture
def copied(two_ranks: Pool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a directory with the checkpoints of steps 2, 4 and 6 of two ranks."""
    if not _trained:
        _trained.append(tmp_path_factory.mktemp("trained"))
        two_ranks.run(bodies.body_loop, str(_trained[0]), 6)
    shutil.copytree(_trained[0], tmp_path / "copy")
    return tmp_path / "copy"


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def name_5(path: Path) -> None:
    path.write_text('{"step": 5}')


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("shared.data-00000-of-00001", tear, "is torn"),
        ("shared.index", corrupt, "is corrupted"),
        ("rank-00001.data-00000-of-00001", corrupt, "is corrupted"),
        ("rank-00001.json", Path.unlink, "No such file"),
        ("manifest.json", tear, "manifest.json"),
        ("latest.json", name_5, "names step 5"),
    ],
)
def test_a_damaged_checkpoint_is_left_out(
    two_ranks: Pool, copied: Path, name: str, damage: Any, says: str
) -> None:
    path = copied / ("" if name == "latest.json" else "step-00000006") / name
    damage(path)
    results = two_ranks.run(bodies.body_restore, str(copied))
    assert [result["start"] for result in results] == [4] * 2
    [warning] = results[0]["warnings"]
    assert (
        says in warning
        and str(path) in warning
        and "of step 4" in warning
        and "is restored" in warning
    )


def test_only_damaged_checkpoints_are_an_error(two_ranks: Pool, copied: Path) -> None:
    latest = (copied / "latest.json").read_text()
    (copied / "latest.json").write_text('{"step": 1}')
    for result in two_ranks.run(bodies.body_restore, str(copied)):
        assert (
            "names step 1; the directory has 6, 4, 2" in result["start"]
            and "What to do: " in result["start"]
        )
    (copied / "latest.json").write_text(latest)
    for path in copied.glob("step-*/shared.index"):
        tear(path)
    for result in two_ranks.run(bodies.body_restore, str(copied)):
        assert "none of the checkpoints" in result["start"] and "step-00000004" in result["start"]


def test_what_was_never_named_is_left_out_and_removed(two_ranks: Pool, copied: Path) -> None:
    shutil.copytree(
        copied / "step-00000006", copied / ".step-00000008-0123abcd"
    )  # killed before the renaming
    shutil.copytree(copied / "step-00000006", copied / "step-00000008")  # killed after it
    shutil.copytree(
        copied / "step-00000006", copied / ".step-00000006-0123abcd"
    )  # killed while it replaced the same
    (copied / "step-00000006").rename(copied / ".step-00000006-0123abcd0")
    results = two_ranks.run(bodies.body_loop, str(copied), 8)
    assert [(result["start"], result["warnings"]) for result in results] == [(6, [])] * 2
    assert steps_in(copied) == ["step-00000004", "step-00000006", "step-00000008"]
    (copied / "latest.json").write_text('{"step": 4}')  # a user goes back
    assert [result["start"] for result in two_ranks.run(bodies.body_restore, str(copied))] == [
        4
    ] * 2


def test_what_the_script_no_longer_has_is_told(single: Pool, tmp_path: Path) -> None:
    [(step, not_kept, texts)] = single.run(bodies.body_fewer_things, str(tmp_path))
    assert step == 1 and not_kept == ("other: this script doesn't have 1 variable of it",)
    assert "a new JobCheckpoint handles SIGTERM from now on" in texts[0]


def test_several_models_and_optimizers(keras_single: Pool, tmp_path: Path) -> None:
    keras_single.run(bodies.body_several_optimizers, str(tmp_path))


@pytest.mark.parametrize("several_ranks", [3], indirect=True)
def test_a_checkpoint_restores_on_another_number_of_ranks(
    several_ranks: Pool, two_ranks: Pool, copied: Path
) -> None:
    for text in two_ranks.run(bodies.body_forgotten, str(copied)):  # saving over another run
        assert "the newest of step 6" in text and "call restore() before the first step" in text
    before = two_ranks.run(bodies.body_restore, str(copied))
    results = several_ranks.run(bodies.body_restore, str(copied))
    assert [result["start"] for result in (*before, *results)] == [6] * 5
    assert before[0]["warnings"] == []
    same_bits(before[0]["weights"], *(result["weights"] for result in results))
    [warning] = results[0]["warnings"]
    assert "2 ranks wrote the checkpoint, and the job now has 3 ranks" in warning
    assert "iterator, noise (per_rank): as this script has made them" in warning
    tear(copied / "step-00000006" / "shared.index")
    newer, other = several_ranks.run(bodies.body_restore, str(copied))[0]["warnings"]
    assert (
        "is torn" in newer and "the one of step 4 is restored" in newer and "2 ranks wrote" in other
    )


def test_a_full_disk_leaves_the_latest_checkpoint_as_it_was(
    two_ranks: Pool, tmp_path: Path
) -> None:
    results = two_ranks.run(bodies.body_full_disk, str(tmp_path))
    for result in results:
        assert result["latest"] == 1
        own, manifest, notes, other, name = result["errors"]
        assert "could not be completed" in name
        assert result["again"] == ["latest.json", "step-00000001"]
        assert "the checkpoint of step 2 could not be written" in own and "rank 1 on host" in own
        assert "could not be completed" in manifest and "must be values for JSON" in notes
        assert "another job writes checkpoints there: it has named step 3 the latest" in other
    assert results[0]["there"] == ["latest.json", "step-00000001"]
    assert results[0]["end"] == ["again", "latest.json", "step-00000001", "step-00000003"]
    goes_on, progress = results[0]["warnings"]
    assert "Training goes on" in goes_on and "npurun can't be told" in progress


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """Its job goes on when it is started again, and again when one rank was asked to stop."""

    def run(*arguments: str, **environment: str) -> list[job.Ended]:
        command = [bodies.__file__, "main", str(tmp_path), *arguments]
        return job.finish(job.start_command(tmp_path, 2, command, **environment), 120)

    first, last = run("8", "killed")
    assert last.code == -signal.SIGKILL
    assert first.code == 1 and "rank 1 on host" in first.output
    progress = tmp_path / "progress"
    asked = run("60", "asked", NPU_DEVICE_PROGRESS_FILE=str(progress))
    assert [ended.code for ended in asked] == [75] * 2, asked
    assert not any("Traceback" in ended.output for ended in asked)
    step = int(progress.read_text())
    assert 7 <= step < 60  # 7 or 8; later where the ranks are slow to tell each other of the signal
    assert json.loads((tmp_path / "checkpoints" / "latest.json").read_text()) == {"step": step}
    assert [ended.code for ended in run(str(step + 2), "whole")] == [0] * 2
    for rank in range(2):
        with (
            np.load(tmp_path / f"whole{rank}.npz") as one,
            np.load(tmp_path / f"{rank}.npz") as other,
        ):
            assert (int(one["start"]), int(other["start"])) == (0, step)
            same_bits(
                *([arrays[name] for name in arrays if name != "start"] for arrays in (one, other))
            )
    assert not list((tmp_path / "checkpoints").glob(".step-*"))


def test_two_that_ask_for_the_last_step(two_ranks: Pool) -> None:
    two_ranks.run(bodies.body_two_ask, timeout=30)


def test_a_checkpoint_of_a_thread_takes_no_signal_away(single: Pool, tmp_path: Path) -> None:
    [text] = single.run(bodies.body_in_a_thread, str(tmp_path))
    assert "this thread can't handle SIGUSR1" in text


def test_many_batches_that_are_passed_over_are_told(two_ranks: Pool) -> None:
    results = two_ranks.run(bodies.body_many_batches, 1200)
    line = "npu_device: iterator (per_rank) passes over 1,200 batches, 0 so far, for another number of ranks\n"
    assert results == [([], 1200, line), ([], 1200, "")]


def test_a_signal_that_comes_as_the_ranks_end(tmp_path: Path) -> None:
    """It leaves the job resumable."""
    processes = job.start_command(tmp_path, 2, [bodies.__file__, "main_late", str(tmp_path)])
    ended = job.finish(processes, timeout=60)
    assert [rank.code for rank in ended] == [75, 75], ended


def test_a_step_that_does_not_end(tmp_path: Path) -> None:
    """Rank 0 is sent the signal twice; rank 1 ends after its limit."""
    command = [bodies.__file__, "main_slow", str(tmp_path)]
    processes = job.start_command(tmp_path, 2, command, NPU_DEVICE_PREEMPT_TIMEOUT="5")
    began = time.monotonic()
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert time.monotonic() - began < 60, [process.output for process in processes]
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    time.sleep(1.5)  # the same signal may come twice at once
    processes[0].send_signal(signal.SIGTERM)
    ended = job.finish(processes, timeout=40)
    assert [rank.code for rank in ended] == [128 + signal.SIGTERM] * 2
    assert (
        "a second signal has come" in ended[0].output
        and "not finished within 5 s" in ended[1].output
    )
    assert json.loads((tmp_path / "checkpoints" / "latest.json").read_text()) == {"step": 1}
