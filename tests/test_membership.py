"""Reading the environment: each scheme, the order between them, contradictions and gaps."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from caught_messages import settings
from test_rank_table import PODS, VERSION_1_0, write

from npu_device._src import environment
from npu_device._src.cluster.description import Membership
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership import interfaces
from npu_device._src.membership.schemes import (
    membership_from_environment,
    world_size_from_environment,
)


def variables_of(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


CM = variables_of(
    "CM_CHIEF_IP=127.0.0.1 CM_CHIEF_PORT=29688 CM_CHIEF_DEVICE=0 CM_WORKER_SIZE=4 CM_WORKER_IP=127.0.0.1"
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Each test begins without the variables, and may set what it likes."""
    with settings():
        for variable in environment.ALL:
            os.environ.pop(variable.name, None)
        yield


def membership(device_id: int | None = None, **variables: str) -> Membership:
    os.environ.update(variables)
    found = membership_from_environment(device_id)
    assert found is not None
    return found


def refused(**variables: str) -> str:
    """The text of the RuntimeError; that of a ValueError is in test_environment."""
    os.environ.update(variables)
    with pytest.raises(RuntimeError) as raised:
        membership_from_environment()
    assert "What to do:" in str(raised.value)
    return str(raised.value)


def tf_config(task: dict[str, Any] | int | None, **cluster: Any) -> str:
    """Return the TF_CONFIG of a task, which may be the number of a worker."""
    task = {"type": "worker", "index": task} if isinstance(task, int) else task
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


def table(path: Path, **variables: str) -> dict[str, str]:
    return {
        "RANK_TABLE_FILE": write(path, VERSION_1_0),
        "RANK_SIZE": "4",
        "RANK_ID": "2",
        **variables,
    }


# Rank table


def test_a_table_on_one_host(tmp_path: Path) -> None:
    """The ranks meet on the loopback; a table of one rank is no job."""
    server = VERSION_1_0["server_list"][0]
    one_server = {**VERSION_1_0, "server_count": "1", "server_list": [server]}
    found = membership(RANK_TABLE_FILE=write(tmp_path, one_server), RANK_SIZE="2", RANK_ID="1")
    assert (found.chief_hosts, found.device_id) == (("127.0.0.1",), 1)
    one_rank = {**one_server, "server_list": [{**server, "device": server["device"][:1]}]}
    os.environ.update(RANK_TABLE_FILE=write(tmp_path, one_rank), RANK_SIZE="", RANK_ID="0")
    assert membership_from_environment() is None


def test_a_rank_table_tells_rank_and_device(tmp_path: Path) -> None:
    found = membership(
        **table(tmp_path, ASCEND_DEVICE_ID="5", JOB_ID="j1", HCCL_CONNECT_TIMEOUT="7")
    )
    assert (found.scheme, found.world_size, found.rank, found.is_chief) == (
        "rank table",
        4,
        2,
        False,
    )
    assert (found.host, found.host_key, found.device_id, found.job_id) == (None, "nodeB", 5, "j1")
    assert (found.chief_hosts, found.chief_port) == (("10.0.0.1", "nodeA", "172.20.0.10"), 61000)
    assert (found.connect_timeout, found.expected_hosts) == (
        7.0,
        ("nodeA", "nodeA", "nodeB", "nodeB"),
    )
    assert world_size_from_environment() == 4
    assert membership(RANK_ID="0").is_chief
    del os.environ["ASCEND_DEVICE_ID"]
    assert membership(RANK_ID="3").device_id == 1  # the local rank
    assert membership(DEVICE_ID="6").device_id == 6
    assert membership(ASCEND_DEVICE_ID="0").device_id == 0
    assert membership(device_id=7).device_id == 7


OTHERS = ",".join(name for _, name in socket.if_nameindex() if name != "lo")


@pytest.mark.parametrize(
    ("names", "is_there"),
    [(names, True) for names in ("lo", "=lo", "eth9,lo", f"^{OTHERS}", f"^={OTHERS}")]
    + [(names, False) for names in ("=l", "eth9,", ",", f"^lo,{OTHERS}")],
)
def test_interface_that_a_rank_announces(
    names: str, is_there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variables = table(tmp_path, HCCL_SOCKET_IFNAME=names)
    assert membership(**variables).host == ("127.0.0.1" if is_there else None)
    warning = f"HCCL_SOCKET_IFNAME is {names!r}"
    assert is_there or (warning in caplog.text and "lo (127.0.0.1)" in caplog.text)
    assert membership(HCCL_IF_IP="10.0.0.9", **variables).host == "10.0.0.9"


def test_the_loopback_is_announced_only_if_nothing_else_fits(tmp_path: Path) -> None:
    other = next(
        (name for name, address in interfaces._ipv4_interfaces() if not address.is_loopback), None
    )
    if other is None:
        pytest.skip("this host has no other interface")
    choices = (f"={other}", f"={other},", f"lo,{other}", "^docker9,", "^=docker9")
    found = {membership(**table(tmp_path, HCCL_SOCKET_IFNAME=names)).host for names in choices}
    assert not found & {"127.0.0.1", None}


def test_where_the_port_comes_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_port = json.loads(json.dumps(VERSION_1_0).replace(', "host_port": "61000"', ""))
    variables = {**table(tmp_path), "RANK_TABLE_FILE": write(tmp_path, no_port)}
    computed = membership(**variables).chief_port
    assert 61000 <= computed < 65000
    assert membership(RANK_ID="0").chief_port == computed
    write(tmp_path, json.dumps(no_port, indent=4))
    assert membership().chief_port == computed
    assert membership(JOB_ID="an other").chief_port != computed
    assert "JOB_ID is 'an other'; Ascend allows letters, digits, - and _ only" in caplog.text
    assert membership(HCCL_IF_BASE_PORT="60008").chief_port == 60008
    write(tmp_path, VERSION_1_0)
    assert membership().chief_port == 61000


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"POD_NAME": "job-worker-0", "ASCEND_DEVICE_ID": "4"}, 0),
        ({"POD_NAME": "job-worker-1"}, 2),
        ({"POD_NAME": "job-worker-1", "RANK_ID": "0"}, 2),
        ({"RANK_ID": "job-worker-1"}, 2),
        ({"RANK_ID": "1"}, 1),
    ],
    ids=str,
)
def test_pods_of_a_rank_table_tell_the_rank(
    variables: dict[str, str], rank: int, tmp_path: Path
) -> None:
    found = membership(RANK_TABLE_FILE=write(tmp_path, PODS), RANK_SIZE="3", **variables)
    assert (found.rank, found.is_chief) == (rank, rank == 0)


def test_devices_that_the_pod_lacks_are_refused(tmp_path: Path) -> None:
    message = refused(RANK_TABLE_FILE=write(tmp_path, PODS), RANK_SIZE="3", POD_NAME="other")
    assert "EI0004" in message
    assert (
        "POD_NAME 'other' is not in it; expected one of its pods: job-worker-0, job-worker-1"
        in message
    )
    message = refused(POD_NAME="job-worker-0")
    assert "pod 'job-worker-0' has 2 devices" in message
    assert "ASCEND_DEVICE_ID is not set; expected one of 4, 5" in message
    assert "ASCEND_DEVICE_ID is 0; expected one of 4, 5" in refused(ASCEND_DEVICE_ID="0")


def test_rank_table_refused(tmp_path: Path) -> None:
    message = refused(**table(tmp_path, RANK_ID="4"))
    assert (
        "EI0004" in message
        and "RANK_ID 4 is not in it; expected one of its ranks, 0 to 3" in message
    )
    assert "RANK_ID is missing or empty" in refused(RANK_ID="")
    message = refused(RANK_ID="0", RANK_SIZE="2")
    assert "EI0004" in message and "it lists 4 ranks, and RANK_SIZE is 2" in message
    message = refused(RANK_SIZE="")
    assert "RANK_SIZE is missing or empty" in message and "lists 4 ranks" in message
    assert "RANK_SIZE is missing or empty" in refused(CM_WORKER_SIZE="4")
    del os.environ["CM_WORKER_SIZE"]
    assert "EI0004" in refused(RANK_SIZE="4", RANK_TABLE_FILE=str(tmp_path / "absent"))
    text = refused(**table(tmp_path, CM_CHIEF_IP="10.0.0.1"))
    assert "both CM_CHIEF_IP (10.0.0.1) and RANK_TABLE_FILE" in text


# CM_*


def test_without_a_table() -> None:
    found = membership(**CM, ASCEND_DEVICE_ID="3")
    assert (found.scheme, found.world_size, found.rank, found.is_chief) == ("CM_*", 4, None, False)
    assert (found.host, found.host_key, found.device_id, found.job_id) == (
        "127.0.0.1",
        "127.0.0.1",
        3,
        "default",
    )
    assert (found.chief_hosts, found.chief_port, found.connect_timeout) == (
        ("127.0.0.1",),
        29688,
        120.0,
    )
    assert world_size_from_environment() == 4


@pytest.mark.parametrize(
    ("variables", "is_chief", "host_key"),
    [
        ({"ASCEND_DEVICE_ID": "0"}, True, "127.0.0.1"),
        ({"ASCEND_DEVICE_ID": "1"}, False, "127.0.0.1"),
        ({"CM_WORKER_IP": "127.0.0.2"}, False, "127.0.0.2"),
        ({"CM_WORKER_IP": ""}, True, "127.0.0.1"),  # the chief's address is one of this host's
        ({"CM_WORKER_IP": "", "CM_CHIEF_IP": "192.0.2.1"}, False, ""),  # it isn't
        ({"CM_WORKER_IP": "::1", "CM_CHIEF_IP": "0:0::1"}, True, "::1"),
    ],
    ids=str,
)
def test_who_is_the_chief(variables: dict[str, str], is_chief: bool, host_key: str) -> None:
    found = membership(**{**CM, **variables})
    assert (found.is_chief, found.host_key) == (is_chief, host_key)


def test_without_a_table_refused() -> None:
    for name in ("CM_CHIEF_IP", "CM_CHIEF_PORT", "CM_CHIEF_DEVICE", "CM_WORKER_SIZE"):
        assert f"{name} is missing or empty" in refused(**{**CM, name: ""})
    text = refused(RANK_SIZE="4")
    assert (
        "CM_WORKER_SIZE is missing or empty" in text
        and "RANK_SIZE belongs to one with a table" in text
    )


def test_values_that_fit_no_scheme_are_refused() -> None:
    for variables, says in (
        (
            {**CM, "CM_WORKER_IP": "fd00::1"},
            "EI0001: .*CM_WORKER_IP is 'fd00::1' and CM_CHIEF_IP is '127.0.0.1'",
        ),
        ({**CM, "RANK_SIZE": "2"}, r"both RANK_SIZE \(2\) and CM_WORKER_SIZE \(4\) are set"),
        ({**CM, "ASCEND_DEVICE_ID": "x"}, "EI0001: .* ASCEND_DEVICE_ID is 'x'"),
    ):
        with settings(**variables), pytest.raises(ValueError, match=says):
            membership_from_environment()


# TF_CONFIG


@pytest.mark.parametrize(
    ("task", "cluster", "rank", "hosts"),
    [
        (1, {"worker": ["w-0.svc:2222", "w-1.svc:2222"]}, 1, ("w-0.svc", "w-1.svc")),
        (
            {"type": "chief", "index": 0},
            {"worker": ["b:2", "c:3"], "chief": ["a:1"]},
            0,
            ("a", "b", "c"),
        ),
        (
            {"type": "worker", "index": "1"},
            {"master": ["a:1"], "worker": ["b:2", "c:3"], "ps": []},
            2,
            ("a", "b", "c"),
        ),
        (2, {"worker": ["a:1", "b:1", "b:2"]}, 2, ("a", "b", "b")),
        (
            0,
            {"worker": ["[fd00::1]:2", "[fd00::2]:2"], "evaluator": ["e:1"]},
            0,
            ("fd00::1", "fd00::2"),
        ),
    ],
)
def test_tf_config_tells_rank_and_hosts(
    task: Any, cluster: Any, rank: int, hosts: tuple[str, ...]
) -> None:
    found = membership(TF_CONFIG=tf_config(task, **cluster))
    assert (found.scheme, found.world_size, found.rank, found.is_chief) == (
        "TF_CONFIG",
        len(hosts),
        rank,
        rank == 0,
    )
    assert (found.expected_hosts, found.chief_hosts, found.host_key) == (
        hosts,
        hosts[:1],
        hosts[rank],
    )
    assert (found.host, found.device_id, found.job_id) == (
        None,
        hosts[:rank].count(hosts[rank]),
        "default",
    )
    first = (cluster.get("chief") or cluster.get("master") or cluster["worker"])[0]
    assert found.chief_port == int(first.rpartition(":")[2])
    assert world_size_from_environment() == len(hosts)


def test_tf_config_beside_ascends_variables(tmp_path: Path) -> None:
    text = refused(RANK_SIZE="2", RANK_ID="0")
    ways = ("RANK_TABLE_FILE", "CM_CHIEF_IP", "TF_CONFIG", "npurun -n 2 train.py")
    assert all(way in text for way in ways)
    config = tf_config(1, worker=["a:1", "b:1"])
    assert membership(TF_CONFIG=config, RANK_SIZE="2", RANK_ID="1").scheme == "TF_CONFIG"
    text = refused(RANK_ID="0")
    assert (
        "RANK_SIZE (2) and RANK_ID (0) contradict TF_CONFIG: by TF_CONFIG this process is rank 1 of 2"
        in text
    )
    del os.environ["RANK_ID"]
    assert "RANK_SIZE (4)" in refused(RANK_SIZE="4")
    assert "RANK_SIZE (1)" in refused(RANK_SIZE="1")  # not silently alone
    table_of_4 = table(tmp_path)
    told = f"the rank table {table_of_4['RANK_TABLE_FILE']}, RANK_SIZE (4) and RANK_ID (2) contradict TF_CONFIG: "
    assert f"{told}by TF_CONFIG this process is rank 1 of 2" in refused(**table_of_4)
    workers = ["a:1", "b:1", "c:1", "d:1"]
    assert f"{told}by TF_CONFIG this process is rank 1 of 4" in refused(
        TF_CONFIG=tf_config(1, worker=workers)
    )
    assert membership(TF_CONFIG=tf_config(2, worker=workers)).scheme == "rank table"
    assert (
        membership(TF_CONFIG=tf_config(0, worker=["a:1"])).scheme == "rank table"
    )  # the process of a platform


def test_tf_config_of_four_beside_less(tmp_path: Path) -> None:
    """Four workers beside a rank table of two ranks or one, or beside a chief."""
    workers = {"TF_CONFIG": tf_config(0, worker=["a:1", "b:1", "c:1", "d:1"])}
    server = VERSION_1_0["server_list"][0]
    for count in (2, 1):
        small = {
            **VERSION_1_0,
            "server_count": "1",
            "server_list": [{**server, "device": server["device"][:count]}],
        }
        path = write(tmp_path, small)
        text = refused(RANK_TABLE_FILE=path, RANK_SIZE=str(count), RANK_ID="0", **workers)
        assert (
            f"the rank table {path}, RANK_SIZE ({count}) and RANK_ID (0) contradict TF_CONFIG"
            in text
        )
        assert "rank 0 of 4" in text
        with pytest.raises(ClusterError, match="contradict TF_CONFIG"):
            world_size_from_environment()
    for name in ("RANK_TABLE_FILE", "RANK_SIZE", "RANK_ID"):
        del os.environ[name]
    assert membership(**CM, **workers).scheme == "CM_*"
    assert "CM_CHIEF_IP (127.0.0.1) and CM_WORKER_SIZE (2) contradict TF_CONFIG" in refused(
        CM_WORKER_SIZE="2"
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{'worker': 1}", "is not valid JSON: line 1, column 2"),
        ('{"cluster": ["a:1", "b:1"]}', "expected an object of task types"),
        (
            tf_config(None, worker=["a:1", "b:1"]),
            "has the task None; expected an object with type and index",
        ),
        (tf_config(-1, worker=["a:1", "b:1"]), "has the task index -1"),
        (
            tf_config(2, worker=["a:1", "b:1"]),
            "which is not in its cluster; expected one of: worker 0, worker 1",
        ),
        (tf_config(0, worker="a:1"), "for cluster.worker; expected a list of addresses"),
        (tf_config(0, worker=["a:1", "b"]), "has 'b' for cluster.worker[1]; expected"),
        (tf_config(0, worker=["fd00::1:1", "b:1"]), 'expected "host:port", or "[address]'),
        (tf_config(0, worker=["a:1", "a:1"]), "gives worker 0 and worker 1 the same"),
        (tf_config(0, worker=["a:1"], gpu=["b:1"]), "has the task type 'gpu'"),
        (
            tf_config({"type": "chief", "index": 0}, chief=["a:1", "b:1"]),
            "has 2 addresses for cluster.chief",
        ),
        (
            tf_config({"type": "chief", "index": 0}, chief=["a:1"], master=["b:1"]),
            "has both chief and master",
        ),
        (tf_config(0, worker=["a:1"], ps=["b:1"]), "has parameter servers"),
        ('{"sparseCluster": {"worker": {"1": "b:1"}}}', "has a sparseCluster and no cluster"),
    ],
)
def test_a_wrong_tf_config_is_refused(config: str, says: str) -> None:
    text = refused(TF_CONFIG=config)
    assert text.startswith("TF_CONFIG ")
    assert says in text
    with pytest.raises(ClusterError):
        world_size_from_environment()
