"""The environment of npurun's ranks: Ascend's variables and a rank table, the same on all nodes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from launcher import npurun, script, start, without_hint
from ranks import free_port

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
    others = {"CM_CHIEF_IP": "10.0.0.1", "CM_WORKER_SIZE": "8", "TF_CONFIG": "{}", "RANK_TABLE_FILE": "/no/such"}
    kept = {"CM_X": "1", "JOB_ID": "10087", "NPU_DEVICE_PREEMPT_TIMEOUT": "7.5"}
    ports = {"NPU_DEVICE_PORT_RANGE": "61100-61103"}
    done = npurun(
        *("-n", "3", script(tmp_path, REPORT), str(tmp_path)), **others, **kept, **ports, NPU_DEVICE_RANK_PROCESS="{}"
    )
    assert done.returncode == 0
    warning, _ = without_hint(done.stderr).decode().split(".", 1)
    assert warning.startswith("npurun: removed from the environment") and all(name in warning for name in others)
    found = reports(tmp_path)
    for rank, report in enumerate(found):
        variables = report["variables"]
        assert variables["RANK_ID"] == variables["ASCEND_DEVICE_ID"] == variables["DEVICE_ID"] == str(rank)
        assert variables["RANK_SIZE"] == "3"
        assert variables["PYTHONUNBUFFERED"] == "1"
        assert kept.items() <= variables.items()
        assert 61100 <= int(variables["NPU_DEVICE_HUB"]) <= 61103
        assert not {"CM_CHIEF_IP", "CM_WORKER_SIZE", "TF_CONFIG", "NPU_DEVICE_RANK_PROCESS"} & variables.keys()
        assert report["modes"] == ["0o700"]
        assert not os.path.exists(os.path.dirname(variables["RANK_TABLE_FILE"])), "the launcher leaves nothing behind"
    assert len({report["table"] for report in found}) == 1
    table = json.loads(found[0]["table"])
    (server,) = table["server_list"]
    assert (table["version"], table["status"], table["server_count"]) == ("1.0", "completed", "1")
    assert (server["server_id"], server["host_ip"]) == ("node0", "127.0.0.1")
    assert [device["rank_id"] for device in server["device"]] == ["0", "1", "2"]
    assert [device["device_id"] for device in server["device"]] == ["0", "1", "2"]
    assert 1 <= int(server["device"][0]["host_port"]) <= 65535


def test_the_secret_is_made_for_each_launch_and_shown_nowhere(tmp_path: Path) -> None:
    report = """
        import os, pathlib
        secret = os.environ["NPU_DEVICE_SECRET"]
        print(secret[:6])
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


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(os.environ.get('NPU_DEVICE_SECRET'))")
    (tmp_path / "secret").write_text("from a file")
    done = npurun(source, NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret"))
    assert (done.stdout, done.stderr) == (b"[0] None\n", b"")
    done = npurun(source, NPU_DEVICE_SECRET_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert b"NPU_DEVICE_SECRET_FILE" in done.stderr


def test_several_nodes_without_a_secret_are_warned(tmp_path: Path) -> None:
    done = npurun("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", script(tmp_path, "pass"))
    assert done.returncode == 0
    assert b"has no secret" in done.stderr
    assert b"NPU_DEVICE_SECRET_FILE" in done.stderr


def test_two_nodes_of_a_platform(tmp_path: Path) -> None:
    source, port = script(tmp_path, REPORT), str(free_port())
    platform = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    variables = {**platform, "NPU_DEVICE_SECRET": "the same on both"}
    launches = [start("-n", "2", source, str(tmp_path), **variables, PET_NODE_RANK=str(node)) for node in (0, 1)]
    for node, launch in enumerate(launches):
        stdout, stderr = launch.communicate(timeout=30)
        assert (launch.returncode, stdout) == (0, b""), stderr
        assert b" and others of the platform say that this is node %d of 2" % node in stderr
    found = reports(tmp_path)
    assert [report["variables"]["RANK_ID"] for report in found] == ["0", "1", "2", "3"]
    assert [report["variables"]["ASCEND_DEVICE_ID"] for report in found] == ["0", "1", "0", "1"]
    assert {report["variables"]["RANK_SIZE"] for report in found} == {"4"}
    assert {report["variables"]["NPU_DEVICE_SECRET"] for report in found} == {"the same on both"}
    assert len({report["variables"]["JOB_ID"] for report in found}) == 1
    assert len({report["table"] for report in found}) == 1
    servers = json.loads(found[0]["table"])["server_list"]
    assert [server["server_id"] for server in servers] == ["node0", "node1"]
    assert servers[0]["host_ip"] == "127.0.0.1"
    assert servers[0]["device"][0]["host_port"] == port
    assert [device["rank_id"] for device in servers[1]["device"]] == ["2", "3"]


def test_the_name_of_the_job(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(os.environ['JOB_ID'])")
    assert re.fullmatch(rb"\[0\] npurun-[0-9a-f]{12}\n", npurun(source).stdout)
    assert npurun("--job-id", "mine", source, JOB_ID="10087").stdout == b"[0] mine\n"
