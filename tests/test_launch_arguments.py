"""npurun's command line: what it takes, what it says about wrong usage, and the environment that the ranks get: the
variables of Ascend and a rank table, the same on all nodes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from caught_messages import settings
from launcher import ROOT, environment, npurun, script, start, without_hint
from ranks import free_port

from npu_device._src.machine.topology import has_amd_processor
from npu_device.launch import docs
from npu_device.launch.arguments import parse

ARGV = "import sys; print(sys.argv[1:])"


@pytest.mark.parametrize(
    "arguments", [["-n", "5"], ["--lr=0.1", "--help"], ["--", "-m", "x y"], ["a", "--", "--tee"]]
)
def test_arguments_of_the_script_are_left_alone(tmp_path: Path, arguments: list[str]) -> None:
    path = script(tmp_path, ARGV)
    assert parse([path, *arguments]).command == (sys.executable, "-u", path, *arguments)


def test_number_of_ranks_after_the_script_is_hinted_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, ARGV)
    parse([path, "--nproc-per-node", "2"])
    assert f"For 2 ranks: npurun -n 2 {path}" in capsys.readouterr().err
    assert parse(["--nproc_per_node=2", path, "-n", "2"]).nproc_per_node == 2
    assert capsys.readouterr().err == ""


def test_module_and_executable_script(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", ARGV + "; print(__name__, __package__)", "train.py")
    done = npurun("-n", "1", "-m", "package.train", "-m", "x", cwd=tmp_path)
    assert done.stdout.decode() == "[0] ['-m', 'x']\n[0] __main__ package\n"
    Path(script(tmp_path, "#!/bin/sh\necho rank $RANK_ID: $1", "train")).chmod(0o755)
    assert npurun("-n", "1", "train", "--x", cwd=tmp_path).stdout == b"[0] rank 0: --x\n"


def test_help_is_short() -> None:
    done = npurun("--help")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and b"--nproc-per-node" in done.stdout and len(lines) < 60
    assert all(
        command in b"\n".join(lines[:24])
        for command in (b"check ", b"verify ", b"port ", b"trace DIR")
    )


def test_check_has_a_help_of_its_own_options() -> None:
    text = npurun("check", "--help").stdout.decode()
    assert text.startswith("usage: npurun check") and "--hosts" in text and "--bind-to" in text
    assert not any(
        word in text for word in ("--trace", "--max-restarts", "--replicate", "a .py file")
    )


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str, **variables: str) -> str:
    with settings(**variables), pytest.raises(SystemExit, match="2"):
        parse(arguments)
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the script is missing"),
        (["no_such.py"], "no such script: no_such.py"),
        (["no_such_program"], "no such script or program: no_such_program"),
        (["."], "is a directory"),
        (["plain"], "chmod +x"),
        (["-n", "cpu", "plain"], "'cpu' is not a whole number of at least 1, or auto"),
        (["-np", "4", "-n", "2", "plain"], "npurun -np 4 -H a:N,b:N; or npurun -n 2"),
        (["-np", "4", "--nnodes", "2", "plain"], "or npurun -n 2 --nnodes 2"),
        (["-np", "4", "-H", "a:3,b:1", "plain"], "npurun -np 4 -H a:2,b:2"),
        (["--tee", "good.py"], "--log-dir"),
        (["--nnodes", "2", "good.py"], "needs --node-rank and --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h", "good.py"], "it is 0 to 1"),
        (["--master-port", "65536", "good.py"], "'65536' is not a whole number from 1 to 65535"),
        (["--job-id", "a b", "good.py"], "letters, digits"),
        (["--grace", "-1", "good.py"], "not a number of seconds"),
        (["--nnodes", "3:2", "good.py"], "'3:2' is not a number of nodes, or MIN:MAX"),
        (["--preempt-signal", "KILL", "good.py"], "is not one of SIGTERM, SIGUSR1, SIGUSR2"),
        (["--hosts", "a:2,b:3", "good.py"], "the same number of ranks on each host; found [2, 3]"),
        (["-n", "4", "--hosts", "a:2", "good.py"], "found [2, 4]"),
        (["--hosts", "a,a", "good.py"], "a is listed twice"),
        (["--hosts", "a:x", "good.py"], "'a:x' is not HOST"),
        (["--hosts", "a,b", "--node-rank", "1", "good.py"], "leave --hosts out"),
        (["--hosts", "a,b", "--nnodes", "3", "good.py"], "the list has 2 hosts"),
        (["--hosts", "a", "--hostfile", "b", "good.py"], "give one of them"),
        (["--hostfile", "/not/there", "good.py"], "No such file"),
        (["--hostfile", "/bin/sh", "good.py"], "/bin/sh is not UTF-8 text"),
        (["--hosts", "localhost,b", "good.py"], "localhost is another host for b"),
        (["--tune", "good.py"], "What to do: trace the script with two splits"),
    ],
)
def test_wrong_usage_is_refused_with_a_reason(
    tmp_path: Path,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "print('ran')", "good.py")
    script(tmp_path, "print('ran')", "plain")
    assert says in usage_error(capsys, *words)


@pytest.mark.parametrize(("visible", "ranks"), [("0,1,GPU-8f", 3), ("", 1), ("-1", 1)])
def test_a_rank_per_visible_gpu(visible: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "7")
    found = [
        parse([*option, "echo"]).nproc_per_node for option in ([], ["-n", "2"], ["-n", "auto"])
    ]
    assert found == [ranks, 2, ranks]


def test_commands_are_the_first_word_only(tmp_path: Path) -> None:
    Path(script(tmp_path, "#!/bin/sh\necho its own: $*", "trace")).chmod(0o755)
    assert npurun("./trace", "tune", cwd=tmp_path).stdout == b"[0] its own: tune\n"
    assert npurun("-n", "1", "trace", cwd=tmp_path).stdout == b"[0] its own:\n"
    for arguments, code, says in (
        (["trace"], 2, "npurun trace: error: the following arguments are required: DIR"),
        (["trace", "nowhere"], 1, "npurun trace: nowhere: there is no trace"),
        (["tune", "trace"], 2, "npurun tune and npu-tune are gone"),
        (["check", "trace"], 2, "check runs its own script once"),
    ):
        done = npurun(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, b"")
        assert says in " ".join(done.stderr.decode().split()) and b"Traceback" not in done.stderr


NODE_0 = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29431",
}
SKY_0 = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}


@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        (NODE_0, [], (2, 2, 0, "127.0.0.1", 29431)),
        ({**NODE_0, "PET_NNODES": "2:3", "PET_NODE_RANK": "2"}, [], (2, 3, 2, "127.0.0.1", 29431)),
        (SKY_0, [], (2, 2, 0, "10.0.0.1", None)),
        ({**SKY_0, **NODE_0, "PET_NODE_RANK": "1"}, [], (2, 2, 1, "127.0.0.1", 29431)),
        (NODE_0, ["--node-rank", "1", "--master-port", "5"], (2, 2, 1, "127.0.0.1", 5)),
        (NODE_0, ["--nnodes", "1"], (1, 1, 0, "127.0.0.1", None)),
        (NODE_0, ["--hosts", "a:1,b:1,c:1"], (3, 3, 0, "a", None)),
    ],
)
def test_variables_of_a_platform_give_the_place_of_a_node(
    variables: dict[str, str], arguments: list[str], expected: object
) -> None:
    with settings(**variables):
        found = parse([*arguments, "echo"])
    place = (
        found.fewest_nodes,
        found.nnodes,
        found.node_rank,
        found.master_addr,
        found.master_port,
    )
    assert place == expected


def test_platforms_that_say_too_little(capsys: pytest.CaptureFixture[str]) -> None:
    for variables, says in (
        ({"PET_NNODES": "2"}, "--nnodes 2 needs --node-rank and --master-addr"),
        (
            {**NODE_0, "PET_NNODES": "two"},
            "PET_NNODES is 'two'; expected a number of nodes, or MIN:MAX",
        ),
        ({**SKY_0, "SKYPILOT_NODE_IPS": ""}, "--nnodes 2 needs --master-addr"),
    ):
        assert says in usage_error(capsys, "echo", "ran", **variables)


def test_the_launcher_the_rendezvous_and_the_options_need_no_tensorflow() -> None:
    modules = (
        "npu_device.launch.__main__, npu_device.launch.checking, npu_device._src.cluster.rendezvous"
    )
    check = (
        f"import sys, {modules}; print([m for m in ('tensorflow', 'numpy') if m in sys.modules])"
    )
    check += "\nimport npu_device._src.environment, npu_device._src.options; print('tensorflow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment(), capture_output=True, check=True
    )
    assert done.stdout == b"[]\nFalse\n"


# What the ranks get

# Each rank leaves its environment and the table's bytes in a file of its own.
REPORT = """
    import json, os, sys
    variables = dict(os.environ)
    table = open(variables["RANK_TABLE_FILE"]).read()
    modes = [oct(os.stat(os.path.dirname(variables["RANK_TABLE_FILE"])).st_mode & 0o777)]
    path = os.path.join(sys.argv[1], "rank" + variables["RANK_ID"] + ".json")
    json.dump({"variables": variables, "table": table, "modes": modes}, open(path, "w"))
"""


def reports(directory: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


def test_variables_and_table(tmp_path: Path) -> None:
    others = {
        "CM_CHIEF_IP": "10.0.0.1",
        "CM_WORKER_SIZE": "8",
        "TF_CONFIG": "{}",
        "RANK_TABLE_FILE": "/no/such",
    }
    kept = {
        "CM_X": "1",
        "JOB_ID": "10087",
        "NPU_DEVICE_PREEMPT_TIMEOUT": "7.5",
        "NPU_DEVICE_PORT_RANGE": "61100-61103",
    }
    arguments = ("-n", "3", script(tmp_path, REPORT), str(tmp_path))
    done = npurun(*arguments, **others, **kept, NPU_DEVICE_RANK_PROCESS="{}")
    assert done.returncode == 0
    warning, _ = without_hint(done.stderr).decode().split(".", 1)
    assert warning.startswith("npurun: removed from the environment") and all(
        name in warning for name in others
    )
    found = reports(tmp_path)
    for rank, report in enumerate(found):
        variables = report["variables"]
        assert (
            variables["RANK_ID"]
            == variables["ASCEND_DEVICE_ID"]
            == variables["DEVICE_ID"]
            == str(rank)
        )
        assert variables["RANK_SIZE"] == "3"
        assert variables["PYTHONUNBUFFERED"] == "1"
        assert kept.items() <= variables.items()
        assert 61100 <= int(variables["NPU_DEVICE_HUB"]) <= 61103
        assert (
            not {"CM_CHIEF_IP", "CM_WORKER_SIZE", "TF_CONFIG", "NPU_DEVICE_RANK_PROCESS"}
            & variables.keys()
        )
        assert report["modes"] == ["0o700"]
        assert not os.path.exists(os.path.dirname(variables["RANK_TABLE_FILE"])), (
            "the launcher leaves nothing behind"
        )
    assert len({report["table"] for report in found}) == 1
    table = json.loads(found[0]["table"])
    (server,) = table["server_list"]
    assert (table["version"], table["status"], table["server_count"]) == ("1.0", "completed", "1")
    assert (server["server_id"], server["host_ip"]) == ("node0", "127.0.0.1")
    assert [(device["rank_id"], device["device_id"]) for device in server["device"]] == [
        (rank, rank) for rank in "012"
    ]
    assert 1 <= int(server["device"][0]["host_port"]) <= 65535


@pytest.mark.parametrize(
    "count, given, setting, expected",
    [
        (2, "", "on", "glibc.cpu.x86_non_temporal_threshold=262144"),
        (
            *(2, "glibc.malloc.check=3", "on"),
            "glibc.malloc.check=3:glibc.cpu.x86_non_temporal_threshold=262144",
        ),
        (
            *(2, "glibc.cpu.x86_non_temporal_threshold=1048576", "on"),
            "glibc.cpu.x86_non_temporal_threshold=1048576",
        ),
        (2, "glibc.malloc.check=3", "off", "glibc.malloc.check=3"),
        (1, "", "on", ""),
        (2, "", "auto", "glibc.cpu.x86_non_temporal_threshold=262144" * has_amd_processor()),
    ],
)
def test_large_copies_of_several_ranks_are_written_past_the_cache(
    tmp_path: Path, count: int, given: str, setting: str, expected: str
) -> None:
    source = script(tmp_path, "import os; print(os.environ.get('GLIBC_TUNABLES', ''))")
    variables = {"NPU_DEVICE_TUNE_COPIES": setting}
    if given:
        variables["GLIBC_TUNABLES"] = given
    done = npurun("-n", str(count), source, **variables)
    lines = sorted(done.stdout.decode().splitlines())
    assert lines == [f"[{rank}] {expected}" for rank in range(count)]


def test_the_secret_is_made_for_each_launch_and_shown_nowhere(tmp_path: Path) -> None:
    report = """
        import os, pathlib
        secret = os.environ["NPU_DEVICE_SECRET"]
        print(secret[:6] + os.environ["JOB_ID"])
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                assert secret not in (process / "cmdline").read_text(errors="replace")
            except OSError:
                pass
        table = pathlib.Path(os.environ["RANK_TABLE_FILE"])
        assert not any(secret in path.read_text() for path in table.parent.iterdir() if path.is_file())
    """
    source = script(tmp_path, report)
    launches = [npurun("-n", "2", source) for _ in range(2)]
    found = [done.stdout.decode().split()[1::2] for done in launches]
    assert all(done.returncode == 0 for done in launches), launches
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]
    assert re.fullmatch("[0-9a-f]{6}npurun-[0-9a-f]{12}", found[0][0])


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(os.environ.get('NPU_DEVICE_SECRET'))")
    (tmp_path / "secret").write_text("from a file")
    done = npurun(source, NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret"))
    assert (done.stdout, done.stderr) == (b"[0] None\n", b"")
    done = npurun(source, NPU_DEVICE_SECRET_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert b"NPU_DEVICE_SECRET_FILE" in done.stderr


def test_two_nodes_of_a_platform(tmp_path: Path) -> None:
    source, port = script(tmp_path, REPORT), str(free_port())
    platform = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    launches = [
        start("-n", "2", source, str(tmp_path), **platform, PET_NODE_RANK=str(node))
        for node in (0, 1)
    ]
    for node, launch in enumerate(launches):
        stdout, stderr = launch.communicate(timeout=30)
        assert (launch.returncode, stdout) == (0, b""), stderr
        assert b" and others of the platform say that this is node %d of 2" % node in stderr
        assert (b"has no secret" in stderr and b"NPU_DEVICE_SECRET_FILE" in stderr) == (node == 0)
    found = reports(tmp_path)
    variables = [report["variables"] for report in found]
    places = [(each["RANK_ID"], each["ASCEND_DEVICE_ID"], each["RANK_SIZE"]) for each in variables]
    assert places == [("0", "0", "4"), ("1", "1", "4"), ("2", "0", "4"), ("3", "1", "4")]
    assert len({(report["variables"]["JOB_ID"], report["table"]) for report in found}) == 1
    servers = json.loads(found[0]["table"])["server_list"]
    assert [server["server_id"] for server in servers] == ["node0", "node1"]
    assert servers[0]["host_ip"] == "127.0.0.1"
    assert servers[0]["device"][0]["host_port"] == port
    assert [device["rank_id"] for device in servers[1]["device"]] == ["2", "3"]


# npurun docs


def test_a_page_is_shown_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([]) == 0
    assert re.search(r"^recipes +Recipes$", capsys.readouterr().out, re.MULTILINE)
    for name in ("faster", "docs/faster.md"):
        assert docs.main([name]) == 0
        assert capsys.readouterr().out.startswith("# Make it faster\n")
    assert docs.main(["recipe"]) == 2
    assert (
        capsys.readouterr().err
        == "npurun docs: there is no page 'recipe'. What to do: name one of recipes\n"
    )


def test_pages_that_messages_name_exist() -> None:
    files = [path for path in (ROOT / "npu_device").rglob("*.py") if path.name != "docs.py"]
    named = {
        name for path in files for name in re.findall(r"npurun docs ([a-z_]+)", path.read_text())
    }
    assert {"reliability", "security"} <= named <= set(docs._pages())
