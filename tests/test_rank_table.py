"""Rank tables: all four forms, every rule, and what the error says when one is broken."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership import rank_table

VERSION_1_0 = json.loads("""
    {"version": "1.0", "status": "completed", "server_count": "2", "server_list": [
        {"server_id": "nodeA", "host_ip": "10.0.0.1", "device": [
            {"device_id": "0", "device_ip": "172.20.0.10", "rank_id": "0", "host_port": "61000"},
            {"device_id": "1", "device_ip": "172.21.0.10", "rank_id": "1"}]},
        {"server_id": "nodeB", "container_ip": "unknown fields are tolerated", "device": [
            {"device_id": "0", "device_ip": "172.20.0.11", "rank_id": "2"},
            {"device_id": "1", "device_ip": "172.21.0.11", "rank_id": "3"}]}]}
""")

PODS = json.loads("""
    {"status": "completed", "group_count": "1", "group_list": [
        {"group_name": "job", "instance_count": "2", "device_count": "3", "instance_list": [
            {"pod_name": "job-worker-0", "server_id": "nodeA", "devices": [
                {"device_id": "4", "device_ip": "172.20.0.10"},
                {"device_id": "5", "device_ip": "172.21.0.10"}]},
            {"pod_name": "job-worker-1", "server_id": "nodeB", "devices": [
                {"device_id": "0", "device_ip": "172.20.0.11"}]}]}]}
""")

_LAB_RANK = """{"devices": [{"device_id": "N", "device_ip": "192.168.10N.101"}], "rank_id": "N",
    "server_id": "10.155.111.140"}"""
_LAB_RANKS = [json.loads(_LAB_RANK.replace("N", str(rank))) for rank in (1, 0, 2, 3)]
LAB: dict[str, Any] = {
    **{
        "deploy_mode": "lab",
        "group_count": "2",
        "para_plane_nic_location": "device",
        "status": "completed",
    },
    "group_list": [
        {"group_name": "", "instance_count": "2", "instance_list": ranks}
        for ranks in (_LAB_RANKS[:2], _LAB_RANKS[2:])
    ],
}


def write(directory: Path, table: Any) -> str:
    path = directory / "table.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table), encoding="utf-8")
    return str(path)


def load(directory: Path, table: Any) -> rank_table.RankTable:
    return rank_table.load(write(directory, table), timeout=1)


_ENTRIES = [("nodeA", 0, None), ("nodeA", 1, None), ("nodeB", 0, None), ("nodeB", 1, None)]


@pytest.mark.parametrize(
    ("table", "has_pods", "expected"),
    [
        (VERSION_1_0, False, _ENTRIES),
        (
            {**VERSION_1_0, "version": "1.2", "super_pod_list": [{"super_pod_id": "0"}]},
            False,
            _ENTRIES,
        ),
        (
            PODS,
            True,
            [
                ("nodeA", 4, "job-worker-0"),
                ("nodeA", 5, "job-worker-0"),
                ("nodeB", 0, "job-worker-1"),
            ],
        ),
        (LAB, True, [("10.155.111.140", device, None) for device in range(4)]),
    ],
    ids=["1.0", "1.2", "pods", "lab"],
)
def test_every_form_of_a_table_is_read(
    table: Any, has_pods: bool, expected: list[tuple[str, int, str | None]], tmp_path: Path
) -> None:
    found = load(tmp_path, table)
    assert (found.size, found.has_pods) == (len(expected), has_pods)
    assert [entry.rank for entry in found.devices] == list(range(len(expected)))
    assert [(entry.server_id, entry.device_id, entry.pod) for entry in found.devices] == expected
    first, host = found.devices[0], "10.0.0.1" if "version" in table else None
    assert (first.host_ip, first.host_port) == (host, host and 61000)
    assert first.device_ip is not None and found.devices[2].host_ip is None


def test_numbers_for_strings_and_another_layout_are_the_same(tmp_path: Path) -> None:
    numbers = json.loads(
        json.dumps(VERSION_1_0).replace('"0"', "0").replace('"1"', "1").replace('"2"', "2")
    )
    assert numbers["server_list"][0]["device"][1]["rank_id"] == 1
    found = load(tmp_path, VERSION_1_0)
    assert load(tmp_path, numbers).devices == found.devices
    assert (
        load(tmp_path, json.dumps(dict(reversed(VERSION_1_0.items())), indent=4)).checksum
        == found.checksum
    )
    assert load(tmp_path, {**VERSION_1_0, "version": "1.2"}).checksum != found.checksum


_GONE = object()

FAULTS: list[
    tuple[Any, dict[str, Any], str]
] = [  # the table, what is changed at which path, what the error says
    (VERSION_1_0, {"status": _GONE}, 'status is missing; expected "completed" or "initializing"'),
    (VERSION_1_0, {"status": "done"}, 'status is "done"; expected "completed"'),
    (VERSION_1_0, {"version": "2.0"}, 'version is "2.0"; expected "1.0" or "1.2"'),
    (VERSION_1_0, {"server_list": _GONE}, "server_list is missing; expected a list of servers"),
    (VERSION_1_0, {"server_count": "3"}, 'server_count is "3"; expected 2'),
    (VERSION_1_0, {"server_list 2": "nodeC"}, 'server_list[2] is "nodeC"; expected an object'),
    (
        VERSION_1_0,
        {"server_list 1 server_id": "nodeA"},
        "expected another one: server_list[0] has the same",
    ),
    (VERSION_1_0, {"server_list 1 server_id": "n" * 65}, "; expected text of 1 to 64 characters"),
    (
        VERSION_1_0,
        {"0 1 rank_id": _GONE},
        "server_list[0].device[1].rank_id is missing; expected a whole number",
    ),
    (
        VERSION_1_0,
        {"1 0 rank_id": "1"},
        "in server_list[0].device[1] and server_list[1].device[0]; expected once",
    ),
    (
        VERSION_1_0,
        {"1 1 rank_id": "4"},
        "rank 3 is missing, while server_list[1].device[1] is rank 4",
    ),
    (
        VERSION_1_0,
        {"0 1 rank_id": "2", "1 0 rank_id": "1"},
        "after rank 1 on another; expected consecutive ranks",
    ),
    (
        VERSION_1_0,
        {"1 1 device_id": "0"},
        "device_id 0 of server 'nodeB' appears twice, in server_list[1].device[0]",
    ),
    (
        VERSION_1_0,
        {"0 0 device_ip": "172.20.0"},
        'device_ip is "172.20.0"; expected an IPv4 or IPv6 address',
    ),
    (VERSION_1_0, {"1 0 device_ip": "fd00::1"}, "expected addresses of one family, IPv4 or IPv6"),
    (
        VERSION_1_0,
        {"0 0 host_port": "70000"},
        'host_port is "70000"; expected a port from 1 to 65535',
    ),
    (PODS, {"group_list 0 instance_count": "1"}, 'group_list[0].instance_count is "1"; expected 2'),
    (PODS, {"group_list 0 device_count": "4"}, 'group_list[0].device_count is "4"; expected 3'),
    (
        PODS,
        {"group_list 0 instance_list 1 pod_name": _GONE},
        "instance_list[1].pod_name is missing; expected the pod",
    ),
]


@pytest.mark.parametrize(("table", "changes", "says"), FAULTS, ids=[says for _, _, says in FAULTS])
def test_a_faulty_table_is_refused_with_a_remedy(
    table: Any, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    spoiled = copy.deepcopy(table)
    for path, value in changes.items():
        place, *keys = [int(key) if key.isdigit() else key for key in path.split()]
        if isinstance(place, int):  # a device of a server
            place, keys = "server_list", [place, "device", *keys]
        holder = spoiled
        for key in keys:
            holder, place = holder[place], key
        if value is _GONE:
            del holder[place]
        elif isinstance(holder, list):
            holder.insert(place, value)
        else:
            holder[place] = value
    with pytest.raises(ClusterError) as raised:
        load(tmp_path, spoiled)
    message = str(raised.value)
    assert message.startswith(f"EI0004: rank table {tmp_path / 'table.json'}: ")
    assert says in message
    assert "What to do:" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"status": "completed",\n  "version": 1.0,,}', "is not valid JSON: line 2, column 18"),
        (b"", "is not valid JSON: line 1, column 1"),
        (b"[1, 2]", r"holds \[1, 2\]; expected a JSON object"),
        (b"\xff\xfe\x00", "it is not UTF-8 text"),
        (None, r"can't be read: No such.*\n.*check the path"),
    ],
)
def test_an_unreadable_file_is_refused_with_the_reason(
    content: bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ClusterError, match=f"EI0004: rank table .*table.json: .*{says}"):
        rank_table.load(str(path), timeout=1)


def test_a_table_that_is_being_filled_is_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path, {"status": "initializing"})
    scheduler = threading.Timer(0.7, lambda: write(tmp_path, VERSION_1_0))
    scheduler.start()
    table = rank_table.load(path, timeout=20)
    scheduler.join()
    assert table.size == 4
    with pytest.raises(ClusterError, match=r'EI0004: .*status is still "initializing" after 1 s'):
        load(tmp_path, {"status": "initializing"})
