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
from compared import same_bits
from pool import Pool


def same_end(first: Any, second: Any) -> None:
    """Compare the weights, and the losses of the steps that both have made."""
    same_bits(first["weights"], second["weights"])
    common = min(len(first["losses"]), len(second["losses"]))
    assert first["losses"][-common:] == second["losses"][-common:]


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


@pytest.mark.slow
def test_a_loop_goes_on_to_the_same_bits(keras_ranks: Pool, tmp_path: Path) -> None:
    """With a common directory; for 3 ranks each has a disk of its own, and the last one's is lost."""
    disks = keras_ranks.size == 3
    whole = keras_ranks.run(bodies.body_loop, str(tmp_path / "whole"), bodies.STEPS, disks)
    keras_ranks.run(bodies.body_loop, str(tmp_path / "parts"), 5, disks)
    shutil.copytree(tmp_path / "parts", tmp_path / "swapped")
    resumed = keras_ranks.run(bodies.body_loop, str(tmp_path / "parts"), bodies.STEPS, disks)
    for one, other in zip(whole, resumed):
        assert (one["start"], other["start"]) == (0, 4)
        assert other["not_kept"] == () and other["warnings"] == []
        same_end(one, other)
    if len(whole) > 1:
        assert whole[0]["losses"] != whole[1]["losses"]  # each rank has noise, data and moving averages of its own
    written = tmp_path / "parts" / ("0" if disks else "")
    assert steps_in(written) == ["step-00000004", "step-00000006", "step-00000008"]
    assert json.loads((written / "latest.json").read_text()) == {"step": 8}
    if disks:
        shutil.rmtree(tmp_path / "swapped" / "2")  # another machine has taken the place of the last host
        results = keras_ranks.run(bodies.body_loop, str(tmp_path / "swapped"), 4, disks)
        assert [result["start"] for result in results] == [4] * 3
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


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("shared.data-00000-of-00001", tear, "is torn"),
        ("shared.index", corrupt, "is corrupted"),
        ("rank-{last}.data-00000-of-00001", corrupt, "is corrupted"),
        ("rank-{last}.json", Path.unlink, "No such file"),
        ("manifest.json", tear, "manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_left_out(two_ranks: Pool, copied: Path, name: str, damage: Any, says: str) -> None:
    path = copied / "step-00000006" / name.format(last=f"{two_ranks.size - 1:05d}")
    damage(path)
    results = two_ranks.run(bodies.body_restore, str(copied))
    assert [result["start"] for result in results] == [4] * two_ranks.size
    [warning] = results[0]["warnings"]
    assert says in warning and str(path) in warning and "the one of step 4 is restored" in warning


def test_only_damaged_checkpoints_are_an_error(two_ranks: Pool, copied: Path) -> None:
    for path in copied.glob("step-*/shared.index"):
        tear(path)
    for result in two_ranks.run(bodies.body_restore, str(copied)):
        assert "none of the checkpoints" in result["start"] and "step-00000004" in result["start"]


def test_what_was_never_named_is_left_out_and_removed(two_ranks: Pool, copied: Path) -> None:
    shutil.copytree(copied / "step-00000006", copied / ".step-00000008-0123abcd")  # killed before the renaming
    shutil.copytree(copied / "step-00000006", copied / "step-00000008")  # killed after it
    results = two_ranks.run(bodies.body_loop, str(copied), 8)
    assert [(result["start"], result["warnings"]) for result in results] == [(6, [])] * two_ranks.size
    assert steps_in(copied) == ["step-00000004", "step-00000006", "step-00000008"]
    (copied / "latest.json").write_text('{"step": 4}')  # a user goes back
    assert [result["start"] for result in two_ranks.run(bodies.body_restore, str(copied))] == [4] * two_ranks.size


@pytest.mark.parametrize(("named", "start"), [(1, "names step 1; the directory has 6, 4, 2"), (5, 4)])
def test_a_latest_that_is_not_there(two_ranks: Pool, copied: Path, named: int, start: Any) -> None:
    (copied / "latest.json").write_text(json.dumps({"step": named}))
    results = two_ranks.run(bodies.body_restore, str(copied))
    if isinstance(start, str):
        assert all(start in result["start"] and "What to do: " in result["start"] for result in results)
        assert len(steps_in(copied)) == 3
    else:
        assert [result["start"] for result in results] == [start] * two_ranks.size
        [warning] = results[0]["warnings"]
        assert "names step 5" in warning


def test_killed_while_a_checkpoint_of_the_same_step_was_replaced(two_ranks: Pool, copied: Path) -> None:
    shutil.copytree(copied / "step-00000006", copied / ".step-00000006-0123abcd")  # the new one
    (copied / "step-00000006").rename(copied / ".step-00000006-0123abcd0")  # the old one
    results = two_ranks.run(bodies.body_restore, str(copied))
    assert [(result["start"], result["warnings"]) for result in results] == [(6, [])] * two_ranks.size
    assert sorted(path.name for path in copied.glob(".step*")) == []


def test_another_job_in_the_directory_is_an_error(ranks: Pool, tmp_path: Path) -> None:
    for rank, (texts, error, there) in enumerate(ranks.run(bodies.body_two_jobs, str(tmp_path))):
        assert ["another job writes checkpoints there" in text for text in texts] == [True] * (rank == 0)
        assert "it has named step 3 the latest" in error
        assert rank or there == ["latest.json", "step-00000003"]


def test_steps_and_notes(ranks: Pool, tmp_path: Path) -> None:
    for rank, (errors, there, texts, end) in enumerate(ranks.run(bodies.body_steps_and_notes, str(tmp_path))):
        assert "must be values for JSON" in errors[0] and "could not be completed" in errors[1]
        assert rank or there == ["latest.json", "step-00000001"]
        assert ["npurun can't be told" in text for text in texts] == [True] * (rank == 0)
        assert rank or end == ["latest.json", "step-00000001", "step-00000003"]


def test_what_the_script_no_longer_has_is_told(single: Pool, tmp_path: Path) -> None:
    [(step, not_kept)] = single.run(bodies.body_fewer_things, str(tmp_path))
    assert step == 1 and not_kept == ("other: this script doesn't have 1 variable of it",)


def test_a_signal_in_a_process_with_many_files(single: Pool, tmp_path: Path) -> None:
    [[text]] = single.run(bodies.body_many_descriptors, str(tmp_path))
    assert "a new JobCheckpoint handles SIGUSR2 from now on" in text


def test_another_number_of_ranks(ranks: Pool, two_ranks: Pool, copied: Path) -> None:
    before = two_ranks.run(bodies.body_restore, str(copied))[0]
    results = ranks.run(bodies.body_restore, str(copied))
    assert [result["start"] for result in results] == [6] * ranks.size
    if ranks.size == 2:
        assert results[0]["warnings"] == []
        return
    same_bits(before["weights"], *(result["weights"] for result in results))
    [warning] = results[0]["warnings"]
    assert f"2 ranks wrote the checkpoint, and the job now has {ranks.size} rank" in warning
    assert "the places of its iterators" in warning and "iterator, noise (per_rank)" in warning
    tear(copied / "step-00000006" / "shared.index")
    newer, other = ranks.run(bodies.body_restore, str(copied))[0]["warnings"]
    assert "is torn" in newer and "the one of step 4 is restored" in newer and "2 ranks wrote" in other


def test_saving_over_another_run_is_an_error(two_ranks: Pool, copied: Path) -> None:
    for text in two_ranks.run(bodies.body_forgotten, str(copied)):
        assert "the newest of step 6" in text and "call restore() before the first step" in text


def test_a_full_disk(ranks: Pool, tmp_path: Path) -> None:
    results = ranks.run(bodies.body_full_disk, str(tmp_path))
    for result in results:
        assert result["latest"] == 1
        assert "the checkpoint of step 2 could not be written" in result["error"]
        if ranks.size > 1:
            assert f"rank {ranks.size - 1} on host" in result["error"]
    assert results[0]["there"] == ["latest.json", "step-00000001"]
    assert results[0]["end"] == ["latest.json", "step-00000001", "step-00000003"]
    [warning] = results[0]["warnings"]
    assert "Training goes on" in warning


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import checkpoint_bodies
checkpoint_bodies.{{name}}()
"""


def write_script(directory: Path, name: str) -> list[str]:
    directory.mkdir(exist_ok=True)
    path = directory / "script.py"
    path.write_text(SCRIPT.format(name=name))
    return [str(path), str(directory)]


def run_job(
    directory: Path, size: int, keras: str, *arguments: str, name: str = "main", **environment: str
) -> list[job.Ended]:
    command = [*write_script(directory, name), *arguments]
    environment = {"TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0", **environment}
    return job.finish(job.start_command(directory, size, command, **environment), timeout=120)


def results_of(directory: Path, size: int, name: str = "") -> list[Any]:
    results = []
    for rank in range(size):
        with np.load(directory / f"{name}{rank}.npz") as arrays:
            results.append(dict(arrays))
    return results


@pytest.mark.slow
def test_preemption(tmp_path: Path, size: int = 2, keras: str = "2") -> None:
    """One rank is sent the signal; ``test_two_that_ask_for_the_last_step`` has several."""
    signals = ["4" if rank == size - 1 else "0" for rank in range(size)]
    progress = tmp_path / "progress"
    stopped = run_job(tmp_path / "job", size, keras, "8", *signals, NPU_DEVICE_PROGRESS_FILE=str(progress))
    assert [ended.code for ended in stopped] == [75] * size, stopped
    assert not any("Traceback" in ended.output for ended in stopped)
    step = int(progress.read_text())
    assert 4 <= step < 8  # 4 or 5; later where the ranks are slow to tell each other of the signal
    assert json.loads((tmp_path / "job" / "checkpoints" / "latest.json").read_text()) == {"step": step}
    assert [ended.code for ended in run_job(tmp_path / "job", size, keras, "8")] == [0] * size
    for one, other in zip(results_of(tmp_path / "job", size, "whole"), results_of(tmp_path / "job", size)):
        assert (int(one["start"]), int(other["start"])) == (0, step)
        for name in set(one) - {"start", "losses"}:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("gives_up", [True, False], ids=["the first gives up", "the first has told"])
def test_two_that_ask_for_the_last_step(several_ranks: Pool, gives_up: bool) -> None:
    """If one gives up, nobody goes on whom the other still holds; if one has told, the other finds the same step."""
    assert len(set(several_ranks.run(bodies.body_two_ask, gives_up, timeout=30))) == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path, size: int = 2) -> None:
    ended = run_job(tmp_path / "job", size, "3", name="main_killed")
    assert ended[-1].code == -signal.SIGKILL
    assert all(other.code == 1 and f"rank {size - 1} on host" in other.output for other in ended[:-1])
    assert [other.code for other in run_job(tmp_path / "job", size, "3", "8")] == [0] * size
    for one, other in zip(results_of(tmp_path / "job", size, "whole"), results_of(tmp_path / "job", size)):
        assert int(other["start"]) in (3, 6)  # 6 if it was killed after all
        np.testing.assert_array_equal(one["arr_0"], other["arr_0"])
    assert not list((tmp_path / "job" / "checkpoints").glob(".step-*"))


@pytest.mark.parametrize("again", [True, False], ids=["second signal", "timeout"])
def test_a_step_that_does_not_end(again: bool, tmp_path: Path, size: int = 2) -> None:
    limit = 60.0 if again else 2.0
    command = write_script(tmp_path, "main_slow")
    processes = job.start_command(tmp_path, size, command, NPU_DEVICE_PREEMPT_TIMEOUT=str(limit))
    began = time.monotonic()
    while len(list(tmp_path.glob("*.ready"))) < size:
        assert time.monotonic() - began < 60, [process.output for process in processes]
        time.sleep(0.05)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    if again:
        time.sleep(1.5)  # the same signal may come twice at once
        for process in processes:
            process.send_signal(signal.SIGTERM)
    ended = job.finish(processes, timeout=40)
    assert [rank.code for rank in ended] == [128 + signal.SIGTERM] * size
    for rank in ended:
        assert ("a second signal has come" if again else "not finished within 2 s") in rank.output
    assert json.loads((tmp_path / "checkpoints" / "latest.json").read_text()) == {"step": 1}
