"""``memory_every``: copies of checkpoints in memory that npurun holds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import memory_bodies as bodies
import pytest
from launcher import npurun, script, start, wait_until
from pool import Pool
from rank_comparison import same_bits
from ranks import free_port

from npu_device._src.check.rank import _facts
from npu_device._src.cluster import handshake
from npu_device._src.machine.free_memory import free_memory, usable_memory
from npu_device._src.testing.hosts import address, can_be_made, hosts, on_host
from npu_device._src.training.checkpoint.memory_slots import (
    SLOTS,
    Memory,
    Slot,
    close_slots,
    copies,
    read,
)
from npu_device.launch.neighbour import Neighbour

pytestmark = pytest.mark.slow


def test_the_newest_complete_copy_is_resumed(two_ranks: Pool, tmp_path: Path) -> None:
    memory = Memory(2)
    try:
        directory = str(tmp_path / "fit")
        addresses = [memory.address] * 2
        printed = two_ranks.run(bodies.body_interrupted, addresses, directory, 9)
        assert "copies in memory every 2 steps: 2 x " in printed[0] and not printed[1]
        # What all ranks share is held once.
        sizes = [slot.size for slot in memory.slots]
        assert max(sizes[SLOTS:]) < min(sizes[:SLOTS])
        # As if rank 1 had been killed while it wrote its newest copy.
        by_key = copies(memory.slots)[directory]
        older, newest = sorted(by_key)
        assert older[1] > 0 and newest[1] <= 9
        by_key[newest][1].clear()
        step = older[1]
        assert memory.step() == step
        newest_step, size = memory.newer_than_disk()[directory]
        assert newest_step == newest[1] and size > 1000
        resumed = two_ranks.run(bodies.body_whole, addresses, directory)
        steps = sorted(os.listdir(directory))
        assert steps == ["latest.json", f"step-{step:08d}", "step-00000015"], steps
        assert not memory.newer_than_disk()
        whole = two_ranks.run(bodies.body_undisturbed, str(tmp_path / "whole"))
        for rank, ran in enumerate(resumed):
            assert ran["not_kept"] == () and list(ran["logs"])[-2:] == [1, 2]
            same_bits(whole[rank]["values"], ran["values"])
        told = [text for text in whole[0]["warnings"] if "memory_every has no effect" in text]
        assert len(told) == 1 and "What to do: start the job with npurun" in told[0]
        # Before npurun ends.
        other = str(tmp_path / "other")
        two_ranks.run(bodies.body_interrupted, addresses, other, 5)
        two_ranks.run(bodies.body_to_disk, [memory.address, ""])
        [_, written] = sorted(os.listdir(other))
        assert "step-00000002" <= written <= "step-00000005"
    finally:
        close_slots([*memory.slots, *memory.received])


def test_copies_of_a_removed_directory_are_not_resumed(two_ranks: Pool, tmp_path: Path) -> None:
    memory = Memory(2)
    try:
        directory = tmp_path / "fit"
        begins = two_ranks.run(
            bodies.body_after_another_training, [memory.address] * 2, str(directory)
        )
        assert begins == [[0, 0, 1, 0]] * 2
        assert copies(memory.slots) and not memory.newer_than_disk() and not directory.exists()
    finally:
        close_slots(memory.slots)


def test_trainings_of_two_directories(two_ranks: Pool, tmp_path: Path) -> None:
    memory = Memory(2)
    try:
        two_ranks.run(bodies.body_two_directories, [memory.address] * 2, str(tmp_path))
        # Rank 1 holds nothing of what it shares with rank 0.
        assert all(slot.size < 100_000 for slot in memory.slots[SLOTS:])
        assert list(memory.newer_than_disk()) == [str(tmp_path / "stays")]
        two_ranks.run(bodies.body_to_disk, [memory.address, ""])
    finally:
        close_slots([*memory.slots, *memory.received])
    assert [path.name for path in tmp_path.iterdir()] == ["stays"]
    assert (tmp_path / "stays/step-00000001").is_dir()


SECRET = b"of the job"


class Hosts:
    """The npuruns of two hosts, as far as they exchange copies: two processes' parts in this one."""

    def __init__(self, ranks: int = 1) -> None:
        self.said: list[str] = []
        self._opened = contextlib.ExitStack()
        self.memories = [Memory(ranks, has_neighbour=True) for _ in range(2)]
        self.neighbours = [
            self._opened.enter_context(Neighbour(memory, SECRET, "127.0.0.1", self.said.append))
            for memory in self.memories
        ]
        for host, neighbour in enumerate(self.neighbours):
            neighbour.send_to(("127.0.0.1", self.neighbours[1 - host].port))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        for memory in self.memories:
            close_slots([*memory.slots, *memory.received])

    @property
    def addresses(self) -> list[str]:
        return [memory.address for memory in self.memories]

    def wait(self) -> None:
        """Wait until all copies are sent."""
        slots = [slot for memory in self.memories for slot in memory.slots]
        wait_until(lambda: not any(slot.is_unsent for slot in slots))


def test_the_part_of_a_lost_host_comes_from_its_neighbour(two_ranks: Pool, tmp_path: Path) -> None:
    directory = str(tmp_path / "fit")
    with Hosts() as pair, Hosts() as later:
        printed = two_ranks.run(bodies.body_interrupted, pair.addresses, directory, 9)
        assert "on each host 2 x " in printed[0] and not printed[1]
        pair.wait()
        # What both hosts have isn't sent, so that less is received than is held.
        held = pair.memories[1].slots[0].size
        assert 0 < pair.memories[0].received[0].size < held
        # The second host is another one now, and has nothing.
        addresses = [pair.addresses[0], later.addresses[1]]
        resumed = two_ranks.run(bodies.body_whole, addresses, directory)
    [_, step, _] = sorted(os.listdir(directory))
    assert "step-00000002" <= step <= "step-00000009"
    whole = two_ranks.run(bodies.body_undisturbed, str(tmp_path / "whole"))
    for rank, ran in enumerate(resumed):
        assert ran["not_kept"] == ()
        same_bits(whole[rank]["values"], ran["values"])


def _record(name: str, content: bytes) -> dict[str, Any]:
    checksum = zlib.crc32(content)
    return {"name": name, "slice": "", "bytes": len(content), "crc": checksum, "held": True}


def test_a_host_sends_what_the_other_lacks() -> None:
    shared = bytes(range(256)) * 40_000
    with Hosts(ranks=2) as pair:
        # The second host's first rank has the same shared part, and all have a file of their own.
        for host, memory in enumerate(pair.memories):
            for rank in (0, 1):
                name = f"rank-{2 * host + rank}"
                contents = [shared, name.encode()] if rank == 0 else [name.encode()]
                records = [_record("shared", shared)] if rank == 0 else []
                records.append(_record(name, name.encode()))
                header = {"attempt": 0, "step": 4, "rank": 2 * host + rank, "records": records}
                memory.slots[SLOTS * rank].write(header, list(map(memoryview, contents)))
        pair.wait()
        for host, memory in enumerate(pair.memories):
            for rank in (0, 1):
                slot = memory.received[SLOTS * rank]
                assert slot.load_header() and slot.header["rank"] == 2 * (1 - host) + rank
                name = f"rank-{slot.header['rank']}"
                assert [bytes(read(span) or b"") for span in slot.spans()] == [name.encode()]
                assert slot.size < 1000
        # Without the same step on the other host, it lacks all.
        memory = pair.memories[0]
        header = {"attempt": 1, "step": 2, "rank": 0, "records": [_record("shared", shared)]}
        memory.slots[0].write(header, [memoryview(shared)])
        for slot in pair.memories[1].slots:
            slot.write({**header, "records": []}, [])
            slot.note_sent()
        pair.wait()
        slot = pair.memories[1].received[0]
        assert slot.load_header() and [read(span) for span in slot.spans()] == [shared]
    assert not pair.said


# Ranks without TensorFlow, which have copies and no checkpoint.
COPYING = """
    import json, os, struct, sys, time, zlib
    from npu_device._src import environment
    from npu_device._src.training.checkpoint.memory_slots import open_slots

    rank, size = int(os.environ["RANK_ID"]), int(os.environ["RANK_SIZE"])
    slots, received = open_slots(environment.NPU_DEVICE_MEMORY_COPIES.get())
    os.makedirs("parts", exist_ok=True)
    records, contents = [], []
    for fields in (
        {"kind": "shared", "name": "v", "path": "v", "dtype": "float32", "shape": [2]},
        {"kind": "file", "name": f"rank-{rank:05d}.note"},
    ):
        content = struct.pack("2f", 3, 4) if fields["kind"] == "shared" else b"of rank %d" % rank
        crc = zlib.crc32(content)
        records.append({**fields, "slice": "", "bytes": len(content), "crc": crc, "held": True})
        contents.append(memoryview(content))
    manifest = {"world_size": size, "notes": {"from": "memory"}, "variables": ["v"]}
    header = {"attempt": 0, "step": 2, "rank": rank, "directory": "/proc/self/cwd/parts", "keep": 3}
    slots[0].write({**header, "manifest": manifest, "records": records}, contents)
    while received and not received[0].load_header():
        time.sleep(0.02)
    open("copied", "w").close()
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("lost", [None, pytest.param(0, marks=pytest.mark.full)])
def test_npuruns_write_the_copies_of_all_hosts_before_they_end(
    lost: int | None, tmp_path: Path
) -> None:
    """The job ends by itself; or node 0 is lost, and Ctrl-C ends the other one, which has all."""
    port = str(free_port())
    job = ("-n", "1", "--nnodes", "2", "--max-restarts", "1", "--master-addr", "127.0.0.1")
    path = script(tmp_path, COPYING)
    nodes = []
    for node in (0, 1):
        here = tmp_path / str(node)
        here.mkdir()
        command = (*job, "--master-port", port, "--node-rank", str(node), path)
        nodes.append(
            start(
                *(*command, "0" if lost is None else "100"),
                on=partial(_in_directory, here),
                NPU_DEVICE_SECRET="known to both",
            )
        )
    if lost is not None:
        wait_until(lambda: all((tmp_path / str(node) / "copied").exists() for node in (0, 1)))
        killed = nodes.pop(0)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=30)
        [left] = nodes
        assert left.stderr is not None
        assert any(b"trying to reach it again" in line for line in left.stderr)
        left.send_signal(signal.SIGINT)
    told = [node.communicate(timeout=120)[1].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0 if lost is None else 130] * len(nodes), told
    assert re.search(r"writing the copy of step 2 in memory, \d+ bytes on this host", told[0]), (
        told[0]
    )
    assert "the copy of step 2 in memory is written to /proc/self/cwd/parts" in told[0], told[0]
    for node in (0, 1)[-len(nodes) :]:
        directory = tmp_path / str(node) / "parts"
        assert sorted(os.listdir(directory)) == ["latest.json", "step-00000002"]
        manifest = json.loads((directory / "step-00000002" / "manifest.json").read_text())
        assert manifest["world_size"] == 2 and manifest["notes"] == {"from": "memory"}
        for name in ("rank-00000.note", "rank-00001.note", "shared.index"):
            [size, checksum] = manifest["files"][name]
            content = (directory / "step-00000002" / name).read_bytes()
            assert (len(content), zlib.crc32(content)) == (size, checksum)


def test_a_second_interrupt_ends_npurun_while_it_writes_a_copy(tmp_path: Path) -> None:
    launcher = start(
        "-n", "1", script(tmp_path, COPYING), "100", on=partial(_in_directory, tmp_path)
    )
    wait_until((tmp_path / "copied").exists)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    lines = []
    while not any(b"Ctrl-C now ends npurun without it" in line for line in lines[-1:]):
        lines.append(launcher.stderr.readline())
        assert lines[-1], lines
    launcher.send_signal(signal.SIGINT)
    told = launcher.communicate(timeout=30)[1].decode()
    assert launcher.returncode == 130, told
    assert "npurun: SIGINT: killing 1 rank at once\n" in told, told
    assert "Traceback" not in told and not (tmp_path / "parts" / "latest.json").exists()


def _in_directory(directory: Path, command: list[str]) -> list[str]:
    return ["env", "-C", str(directory), *command]


RING = """
    import os, time, zlib
    from npu_device._src import environment
    from npu_device._src.training.checkpoint.memory_slots import open_slots

    rank = int(os.environ["RANK_ID"])
    slots, received = open_slots(environment.NPU_DEVICE_MEMORY_COPIES.get())
    contents = {"shared": bytes(10_000_000), "own": b"of rank %d" % rank}
    records = [
        {"name": name, "slice": "", "bytes": len(text), "crc": zlib.crc32(text), "held": True}
        for name, text in contents.items()
    ]
    header = {"attempt": 0, "step": 2, "rank": rank, "directory": "", "records": records}
    slots[0].write(header, list(map(memoryview, contents.values())))
    while slots[0].is_unsent or not received[0].load_header():
        time.sleep(0.02)
    print(f"holds rank {received[0].header['rank']}, {received[0].size} bytes", flush=True)
"""


@pytest.mark.full
@pytest.mark.skipif(not can_be_made(), reason="needs root, ip and tc")
def test_hosts_send_their_copies_around_in_a_circle(tmp_path: Path) -> None:
    job = ("-n", "1", "--nnodes", "3", "--max-restarts", "1", "--master-addr", address(0))
    command = (*job, "--master-port", "29700", script(tmp_path, RING))
    with hosts(3, gbit=1.0):
        launchers = [
            start(
                *("--node-rank", str(node), *command),
                on=partial(on_host, node),
                NPU_DEVICE_SECRET="known to all of them",
            )
            for node in range(3)
        ]
        for node, launcher in enumerate(launchers):
            told, _ = launcher.communicate(timeout=60)
            # All have the shared part themselves.
            found = re.search(rb"holds rank (\d), (\d+) bytes", told)
            assert found and int(found[1]) == (node - 1) % 3 and int(found[2]) < 1000, told


def test_half_a_copy_of_another_host_is_never_used() -> None:
    content = b"x" * 1000
    header = {"attempt": 0, "step": 4, "rank": 1, "records": [_record("shared", content)]}
    with Hosts() as pair:
        port = pair.neighbours[0].port
        with pytest.raises(OSError, match="refused"):
            handshake.reach("127.0.0.1", port, 5, b"another secret")
        # Node 0 proves the same secret for another purpose.
        with pytest.raises(OSError, match="refused"):
            handshake.reach("127.0.0.1", port, 5, SECRET + b" nodes")
        for memory in pair.memories:
            memory.slots[0].write({**header, "records": []}, [])
        pair.wait()
        received = pair.memories[0].received[1]
        for count, is_whole in ((500, None), (1000, None), (1000, False)):
            line = handshake.reach("127.0.0.1", port, 5, SECRET + b" copies")
            with line.connection:
                line.send({"slot": 1, "header": header})
                answer = line.receive(5, silent="", closed="")
                assert answer == {"lacking": [0]}
                line.connection.sendall(content[:count])
                if is_whole is not None:
                    line.send({"is_whole": is_whole})
                    assert line.receive(5, silent="", closed="") == {"is_taken": True}
            # One connection after the other is handled.
            assert not received.load_header()
        # The other host is gone: the ranks go on copying, and one line tells it.
        pair.neighbours[0].send_to(("127.0.0.1", free_port()))
        for step in (6, 8):
            pair.memories[0].slots[0].write({**header, "step": step}, [memoryview(content)])
            pair.wait()
    assert len(pair.said) == 1 and "can't be sent to 127.0.0.1" in pair.said[0]


@pytest.mark.full
@pytest.mark.parametrize("size, victim", [(1, 0), (2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("options", [(), ("--shard-optimizer",)], ids=["", "divided"])
def test_a_killed_rank_costs_few_steps(
    size: int, victim: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    launched = ("-n", str(size), "--max-restarts", "1", "--restart-backoff", "0.1", *options)
    done = npurun(*launched, bodies.__file__, str(tmp_path), str(victim), "rank", limit=180)
    told = done.stderr.decode()
    assert done.returncode == 0 and "killed by SIGKILL" in told, told
    # Steps are shorter than copies here: up to two copies were on their way when the rank was killed after step 8.
    steps = sorted(path.name for path in (tmp_path / "parts").glob("step-*"))
    assert "step-00000002" <= steps[0] <= "step-00000008", steps


SSH = """\
    #!/bin/sh
    # Runs a command here, in a directory of the host.
    here={here}/$1
    mkdir -p $here
    shift
    exec sh -c "$(echo "$*" | sed "s|cd [^ ]*|cd $here|")"
    """


def _train_on_hosts(
    tmp_path: Path, hosts: str, is_shared: bool, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[bytes], list[list[str]]]:
    """Train on two hosts, which share the directory of the checkpoints or not; return their steps in each, too."""
    ssh = Path(script(tmp_path, SSH.format(here=tmp_path), "ssh"))
    ssh.chmod(0o755)
    where = ("--hosts", hosts, "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    directory = str(tmp_path) if is_shared else "/proc/self/cwd"
    done = npurun(
        *where,
        *("--max-restarts", "1", "--restart-backoff", "0.1", *options),
        *(bodies.__file__, directory, *arguments),
        limit=300,
        NPU_DEVICE_SSH=str(ssh),
    )
    folders = [tmp_path] if is_shared else [tmp_path / "one", tmp_path / "two"]
    return done, [sorted(map(_name, (folder / "parts").glob("step-*"))) for folder in folders]


def _name(path: Path) -> str:
    return path.name


@pytest.mark.full
@pytest.mark.parametrize(
    "victim, hosts", [(0, "one:1,two:1"), (1, "one:1,two:1"), (2, "one:2,two:2")]
)
@pytest.mark.parametrize("is_shared", [True, False], ids=["", "apart"])
@pytest.mark.parametrize("options", [(), ("--shard-optimizer",)], ids=["", "divided"])
def test_a_lost_host_costs_few_steps(
    victim: int, hosts: str, is_shared: bool, options: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = (str(victim), "host")
    done, steps = _train_on_hosts(tmp_path, hosts, is_shared, *arguments, options=options)
    told = done.stderr.decode()
    assert done.returncode == 0, told
    assert "and up to as much of another host" in told
    assert all("step-00000004" <= names[0] <= "step-00000008" for names in steps), steps


@pytest.mark.full
@pytest.mark.parametrize("is_shared", [True, False], ids=["", "apart"])
@pytest.mark.parametrize("options", [(), ("--shard-optimizer",)], ids=["", "divided"])
def test_an_interrupted_job_of_two_hosts_goes_on_from_its_copies(
    is_shared: bool, options: tuple[str, ...], tmp_path: Path
) -> None:
    job = (tmp_path, "one:2,two:2", is_shared, "3", "interrupt")
    done, steps = _train_on_hosts(*job, options=options)
    assert done.returncode == 130, done.stderr.decode()
    for names in steps:
        [name] = names
        assert "step-00000004" <= name <= "step-00000008", steps
    # The script compares its bits with those of an undisturbed training.
    done, again = _train_on_hosts(*job, options=options)
    assert done.returncode == 0, done.stderr.decode()
    assert all(names[0] == before[0] for names, before in zip(again, steps)), again


@pytest.mark.full
def test_a_killed_npurun_leaves_the_checkpoint_on_the_disk(tmp_path: Path) -> None:
    arguments = ("-n", "2", bodies.__file__, str(tmp_path), "1", "host", "5")
    assert npurun(*arguments, limit=180).returncode == -9
    assert sorted(os.listdir(tmp_path / "parts")) == ["latest.json", "step-00000005"]
    # The copy of step 6 or 8 is gone with npurun.
    done = npurun(*arguments, limit=180)
    assert done.returncode == 0, done.stderr.decode()
    steps = sorted(path.name for path in (tmp_path / "parts").glob("step-*"))
    assert steps[0] == "step-00000005", steps


@pytest.mark.full
def test_a_script_that_ends_without_close_leaves_its_last_copy(tmp_path: Path) -> None:
    done = npurun("-n", "2", bodies.__file__, str(tmp_path), "0", "nothing", limit=180)
    told = done.stderr.decode()
    assert done.returncode == 0 and "the copy of step 1 in memory is written to" in told, told
    assert (tmp_path / "step-00000001").is_dir()


def test_too_little_memory_is_an_error_and_a_full_one_a_warning(
    single: Pool, tmp_path: Path
) -> None:
    memory = Memory(1)
    try:
        [text] = single.run(bodies.body_too_large, memory.address)
        assert text.startswith("CheckpointError: there is too little memory for memory_every")
        assert "two copies of 1,125,899,906.8 MB" in text and "What to do: give the job" in text
        directory = tmp_path / "full"
        assert single.run(bodies.body_dropped, memory.address, str(tmp_path / "dropped")) == [0]
        [texts] = single.run(bodies.body_full, memory.address, str(directory))
        [text] = texts
        assert "a copy in memory has failed: OSError" in text and "What to do: " in text
        assert (directory / "step-00000003").is_dir() and memory.step() is None
    finally:
        close_slots([*memory.slots, *memory.received])


def test_without_room_for_temporary_files_training_goes_on_and_stops_with_a_checkpoint(
    two_ranks: Pool, tmp_path: Path
) -> None:
    memory = Memory(2)
    directory = tmp_path / "run"
    try:
        addresses = [memory.address] * 2
        warned = two_ranks.run(bodies.body_no_temporary_files, addresses, str(directory))
    finally:
        close_slots([*memory.slots, *memory.received])
    [of_copies] = warned[0]
    assert "isn't copied to memory" in of_copies and "rank 1" in of_copies
    assert "No such file or directory" in of_copies and "TMPDIR" in of_copies
    [of_samples] = warned[1]
    assert "the next samples of iterators can't be noted" in of_samples
    step = json.loads((directory / "latest.json").read_text())["step"]
    manifest = json.loads((directory / f"step-{step:08}/manifest.json").read_text())
    assert manifest["samples"] == [] and step >= 3


def test_a_slot_takes_what_is_complete_only() -> None:
    slot = Slot(os.memfd_create("test"))
    try:
        assert not slot.load_header()
        content = memoryview(bytes(range(256)) * 20_000)
        header = {"step": 3, "records": [{"bytes": len(content), "crc": 0, "held": True}]}
        slot.write(header, [content])
        assert slot.load_header() and slot.header == header
        # Another checksum than that of the content.
        assert [read(span) for span in slot.spans()] == [None]
        slot.clear()
        assert not slot.load_header() and slot.size > len(content)
        header["records"] = [{"bytes": 1 << 50, "crc": 0, "held": True}]
        with pytest.raises(MemoryError, match=r"MB more, and .* are free"):
            slot.begin(header)
    finally:
        os.close(slot.descriptor)


def test_free_memory_is_what_the_smallest_group_leaves(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert free_memory(tmp_path) == 5000 << 10
    assert usable_memory(tmp_path) == 9000 << 10
    write("proc/self/cgroup", "0::/job/task\n")
    write("sys/fs/cgroup/job/memory.max", "4096000")
    write("sys/fs/cgroup/job/memory.current", "1096000")
    write("sys/fs/cgroup/job/memory.stat", "anon 7\ninactive_file 500000\n")
    write("sys/fs/cgroup/job/task/memory.max", "max")
    assert free_memory(tmp_path) == 3_500_000
    assert usable_memory(tmp_path) == 4_096_000
    facts = _facts(None, tmp_path)
    assert (facts.free, facts.memory) == (3_500_000, 4_096_000), (
        "npurun check tells what a container has"
    )
    write("proc/self/cgroup", "4:memory:/\n")
    for name, number in (("limit", 3_000_000), ("usage", 2_000_000)):
        write(f"sys/fs/cgroup/memory/memory.{name}_in_bytes", str(number))
    write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000")
    assert free_memory(tmp_path) == 1_001_000
    assert usable_memory(tmp_path) == 3_000_000


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "10"])
def test_bad_values_are_errors(single: Pool, wrong: object, tmp_path: Path) -> None:
    [text] = single.run(bodies.body_wrong, str(tmp_path), wrong)
    assert text.startswith("ValueError: memory_every must be None") and repr(wrong) in text
