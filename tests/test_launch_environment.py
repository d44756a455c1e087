"""The environment of npurun's ranks: Ascend's variables and a rank table, the same on all nodes."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
from launcher import npurun, script, start, without_hint

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


@pytest.mark.parametrize("ranks", [1, 3])
def test_variables_and_table(tmp_path: Path, ranks: int) -> None:
    done = npurun("-n", str(ranks), script(tmp_path, REPORT), str(tmp_path))
    assert (done.returncode, without_hint(done.stderr)) == (0, b"")
    found = reports(tmp_path)
    assert len(found) == ranks
    for rank, report in enumerate(found):
        variables = report["variables"]
        assert variables["RANK_ID"] == variables["ASCEND_DEVICE_ID"] == variables["DEVICE_ID"] == str(rank)
        assert variables["RANK_SIZE"] == str(ranks)
        assert variables["PYTHONUNBUFFERED"] == "1"
        assert re.fullmatch(r"[A-Za-z0-9_-]+", variables["JOB_ID"])
        assert report["modes"] == ["0o700"]
        assert not os.path.exists(variables["RANK_TABLE_FILE"]), "the launcher leaves nothing behind"
        assert not os.path.exists(os.path.dirname(variables["RANK_TABLE_FILE"]))
    assert len({report["table"] for report in found}) == 1
    assert len({report["variables"]["JOB_ID"] for report in found}) == 1
    table = json.loads(found[0]["table"])
    (server,) = table["server_list"]
    assert (table["version"], table["status"], table["server_count"]) == ("1.0", "completed", "1")
    assert (server["server_id"], server["host_ip"]) == ("node0", "127.0.0.1")
    assert [device["rank_id"] for device in server["device"]] == [str(rank) for rank in range(ranks)]
    assert [device["device_id"] for device in server["device"]] == [str(rank) for rank in range(ranks)]
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


def test_the_users_secret_wins(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(os.environ.get('NPU_DEVICE_SECRET'))")
    assert npurun(source, NPU_DEVICE_SECRET="mine").stdout == b"[0] mine\n"
    (tmp_path / "secret").write_text("from a file")
    assert npurun(source, NPU_DEVICE_SECRET_FILE=str(tmp_path / "secret")).stdout == b"[0] None\n"
    done = npurun(source, NPU_DEVICE_SECRET_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert b"NPU_DEVICE_SECRET_FILE" in done.stderr


def test_several_nodes_without_a_secret_are_warned(tmp_path: Path) -> None:
    done = npurun("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", script(tmp_path, "pass"))
    assert done.returncode == 0
    assert b"has no secret" in done.stderr
    assert b"NPU_DEVICE_SECRET_FILE" in done.stderr


def test_the_port_range_is_kept(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(os.environ['NPU_DEVICE_HUB'])")
    ports = {npurun(source, NPU_DEVICE_PORT_RANGE="61100-61103").stdout.split()[1] for _ in range(3)}
    assert ports <= {b"61100", b"61101", b"61102", b"61103"}


def test_two_nodes(tmp_path: Path) -> None:
    source = script(tmp_path, REPORT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = ["-n", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master_port", port]
    secret = {"NPU_DEVICE_SECRET": "the same on both"}
    launches = [start(*common, "--node-rank", str(node), source, str(tmp_path), **secret) for node in (0, 1)]
    assert [launch.wait(30) for launch in launches] == [0, 0]
    for launch in launches:
        stdout, stderr = launch.communicate()
        assert (stdout, without_hint(stderr)) == (b"", b"")
    found = reports(tmp_path)
    assert [report["variables"]["RANK_ID"] for report in found] == ["0", "1", "2", "3"]
    assert [report["variables"]["ASCEND_DEVICE_ID"] for report in found] == ["0", "1", "0", "1"]
    assert {report["variables"]["RANK_SIZE"] for report in found} == {"4"}
    assert len({report["variables"]["JOB_ID"] for report in found}) == 1
    assert len({report["table"] for report in found}) == 1
    servers = json.loads(found[0]["table"])["server_list"]
    assert [server["server_id"] for server in servers] == ["node0", "node1"]
    assert servers[0]["host_ip"] == "127.0.0.1"
    assert servers[0]["device"][0]["host_port"] == port
    assert [device["rank_id"] for device in servers[1]["device"]] == ["2", "3"]


def test_the_job_id_of_the_user_wins(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(os.environ['JOB_ID'])")
    assert npurun(source, JOB_ID="10087").stdout == b"[0] 10087\n"
    assert npurun("--job-id", "mine", source, JOB_ID="10087").stdout == b"[0] mine\n"


def test_other_descriptions_of_a_job_are_taken_away_with_a_warning(tmp_path: Path) -> None:
    source = script(tmp_path, "import os; print(sorted(n for n in os.environ if n.startswith(('CM_', 'TF_CONFIG'))))")
    done = npurun(
        source, CM_CHIEF_IP="10.0.0.1", CM_WORKER_SIZE="8", TF_CONFIG="{}", RANK_TABLE_FILE="/no/such", CM_X="1"
    )
    assert done.stdout == b"[0] ['CM_X']\n"
    warning = done.stderr.decode()
    assert warning.startswith("npurun: ")
    assert all(name in warning for name in ("CM_CHIEF_IP", "CM_WORKER_SIZE", "TF_CONFIG", "RANK_TABLE_FILE"))
    assert without_hint(npurun(source).stderr) == b""
