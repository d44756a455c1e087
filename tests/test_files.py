"""What a replicated model writes: once, by rank 0, which never waits; the others can read it in their next line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import file_bodies
import job
from pool import Pool
from ranks import table_environment

COMMON = """
import sys, time
sys.path.insert(0, {tests!r})
import npu_device as npu
rank = npu.open().worker_id
from file_bodies import make, value_in
import tensorflow as tf
model, written = make(7)
"""


def script(text: str) -> str:
    return COMMON.format(tests=str(Path(__file__).parent)) + text


def test_the_next_line_reads_the_file(keras_two_ranks: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(keras_two_ranks.run(file_bodies.body_next_line, keras_two_ranks.keras, str(tmp_path))):
        assert len(found) == (8 if keras_two_ranks.keras == "2" else 6)
        for number, (name, value, written) in enumerate(found):
            assert (value, written) == (number, int(rank == 0)), (rank, name)


def test_ranks_that_save_more_often_than_others(several_keras_ranks: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(several_keras_ranks.run(file_bodies.body_other_numbers_of_saves, str(tmp_path))):
        expected = [f"own{rank}.keras"]
        if rank == 0:
            assert found.pop("seconds") < 10
            expected = ["model.keras"] * 6 + ["first.keras", *expected]
        else:
            expected = [f"other{rank}.keras", *expected]
        assert found.pop("written") == expected
        assert found == {"after one of rank 0": 1, "second of 2": 2.5, "second of 3": 3.5}


def test_a_save_that_fails_and_directories_of_each_rank(keras_two_ranks: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(keras_two_ranks.run(file_bodies.body_fails_and_apart, str(tmp_path))):
        error, value, said, apart = found
        assert rank == 0 or f"rank 0 failed to write {tmp_path}/file/model.keras: " in error
        assert error and value == 4, "the next save is another one"
        assert apart == (4, ["model.keras"], ["model.keras"])
        assert [text.startswith("rank 1 ") and "model.save(path)" in text for text in said] == [True] * rank


def test_callbacks_write_and_print_on_rank_0(keras_two_ranks: Pool, tmp_path: Path) -> None:
    keras = keras_two_ranks.keras
    for rank, found in enumerate(keras_two_ranks.run(file_bodies.body_in_fit, keras, str(tmp_path))):
        printed, written, read, speaking, rows, boards, files = found
        assert printed == (rank == 0)
        assert bool(written) == (rank == 0)
        assert read == [True, True]
        assert speaking == 4, "the callbacks get their setting back"
        assert (rows, boards) == (3, 1)
        assert {"best.keras", "1.weights.h5", "2.weights.h5"} <= set(files)
        assert keras == "3" or {"prefix.index", "saved_model"} <= set(files)


def test_keras_own_list_of_callbacks(keras_two_ranks: Pool, tmp_path: Path) -> None:
    """Ranks stop together, and rank 0 alone writes."""
    for found in keras_two_ranks.run(file_bodies.body_own_list, str(tmp_path)):
        assert found == ([0], 3)


def test_hosts_without_a_common_file_system(tmp_path: Path) -> None:
    """The first rank of the second host writes for it."""
    text = """
import os
os.makedirs(f"{sys.argv[0]}.{min(rank, 1)}", exist_ok=True)
os.chdir(f"{sys.argv[0]}.{min(rank, 1)}")
model.save("model.keras")
print(value_in(tf.keras.models.load_model("model.keras").get_weights()), written)
"""
    ended = job.finish(job.start_each(tmp_path, script(text), two_hosts(tmp_path)))
    assert [end.code for end in ended] == [0, 0, 0], ended
    assert [said(end) for end in ended] == ["7.0 ['model.keras']", "7.0 ['model.keras']", "7.0 []"], ended


def said(end: job.Ended) -> str:
    """Return what a rank has read and written, among its warnings."""
    [line] = [line for line in end.output.splitlines() if line.startswith("7.0 ")]
    return line


def two_hosts(directory: Path) -> list[dict[str, str]]:
    """Return the environments of three ranks on this machine, the last two of which call it another host."""
    environments = [{**table_environment(directory, 3, rank), "NPU_DEVICE_SECRET": "ours"} for rank in range(3)]
    path = Path(environments[0]["RANK_TABLE_FILE"])
    table = json.loads(path.read_text())
    [server] = table["server_list"]
    server["server_id"] = "127.0.0.1"
    other: dict[str, Any] = {"server_id": "127.0.0.2", "device": server["device"][1:]}
    for number, device in enumerate(other["device"]):
        device["device_id"] = str(number)
        environments[number + 1]["ASCEND_DEVICE_ID"] = str(number)
    server["device"] = server["device"][:1]
    path.write_text(json.dumps({**table, "server_count": "2", "server_list": [server, other]}))
    return environments


def test_rank_0_has_left(tmp_path: Path) -> None:
    text = """
path = sys.argv[0] + ".keras"
if rank:
    from npu_device._src.collectives.job import current
    while not current().health.has_left(0):
        time.sleep(0.05)
model.save(path)
print(value_in(tf.keras.models.load_model(path).get_weights()), written)
"""
    ended = job.run(tmp_path, 2, script(text))
    assert [said(end) for end in ended] == ["7.0 ['script.py.keras']", "7.0 []"], ended


def test_rank_0_does_not_come_and_then_dies_while_it_writes(tmp_path: Path) -> None:
    text = """
import os
path = sys.argv[0] + ".keras"
if rank == 0:
    time.sleep(5)
    import file_bodies
    file_bodies.time.sleep = lambda seconds: os._exit(9)
else:
    try:
        model.save(path)
    except TimeoutError as error:
        print(error)
npu.distribute.barrier()
model.save(path)
"""
    ended = job.run(tmp_path, 2, script(text), NPU_DEVICE_STALL_TIMEOUT="2")
    assert (ended[0].code, ended[1].code) == (9, 1)
    output = ended[1].output
    assert "rank 1: rank 0 writes" in output and "script.py.keras" in output
    assert "2 s (NPU_DEVICE_STALL_TIMEOUT)" in output and "`if npu.distribute.is_main():`" in output
    assert "PeerError: rank 0 on host" in output and ended[1].at - ended[0].at < 10
