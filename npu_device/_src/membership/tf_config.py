"""TensorFlow's own description of a job, ``TF_CONFIG``. Ranks are the chief (or "master") and then the workers.

Source: TensorFlow guide "Distributed training with TensorFlow", setting up TF_CONFIG.
"""

from __future__ import annotations

import json
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.description import Membership
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.environment.forms import address_and_port

_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_CHIEFS = ("chief", "master")


def read(device_id: int | None = None) -> Membership | None:
    """Return the place of this process in the job of ``TF_CONFIG``; None for an evaluator, or without a cluster."""
    text = environment.TF_CONFIG.raw()
    if text is None:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise _fault(
            f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    if not isinstance(config, dict):
        raise _fault(f"is {config!r}; expected a JSON object")
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise _fault(
            f"has the cluster {cluster!r}; expected an object of task types, each with a list of addresses"
        )
    if not cluster and config.get("sparseCluster"):
        raise _fault(
            "has a sparseCluster and no cluster: it names only some of the tasks, and here every rank has to know all"
        )
    # A process that is in no cluster runs alone.
    if not cluster:
        return None
    task_type, index = _task(config)
    # An evaluator runs beside the training, by itself.
    if task_type == "evaluator":
        return None
    rank, addresses = _job(cluster, task_type, index)
    hosts = tuple(host for host, _ in addresses)
    if device_id is None:
        # TF_CONFIG names no device: the ranks of a host take its devices in their order.
        device_id = hosts[:rank].count(hosts[rank])
    return Membership(
        scheme="TF_CONFIG",
        world_size=len(hosts),
        rank=rank,
        host=None,
        host_key=hosts[rank],
        device_id=device_id,
        is_chief=rank == 0,
        chief_hosts=(hosts[0],),
        chief_port=addresses[0][1],
        expected_hosts=hosts,
    )


_Address = tuple[str, int]
_Task = tuple[str, int]  # type and index


def _job(cluster: dict[str, Any], task_type: str, index: int) -> tuple[int, list[_Address]]:
    """Return the rank of a task, and the addresses of all ranks."""
    if cluster.get("ps"):
        raise ClusterError(
            f"TF_CONFIG has parameter servers ({cluster['ps']}); here every rank holds all variables.\n"
            "What to do: describe a job that has only workers, or use tf.distribute.ParameterServerStrategy instead."
        )
    unknown = sorted(set(cluster) - {*_CHIEFS, "worker", "ps", "evaluator"})
    if unknown:
        raise _fault(
            f"has the task type {unknown[0]!r} in its cluster; expected chief (or master), worker and evaluator only"
        )
    chiefs = [name for name in _CHIEFS if cluster.get(name)]
    if len(chiefs) > 1:
        raise _fault("has both chief and master in its cluster; expected one of them")
    tasks: dict[_Address, _Task] = {}
    # The chief comes first in the order of the ranks.
    for name in (*chiefs, "worker"):
        texts = cluster.get(name) or []
        if not isinstance(texts, list):
            raise _fault(f"has {texts!r} for cluster.{name}; expected a list of addresses")
        if name in _CHIEFS and len(texts) != 1:
            raise _fault(f"has {len(texts)} addresses for cluster.{name}; expected one")
        for position, text in enumerate(texts):
            _add_task(tasks, (name, position), text)
    if (task_type, index) not in tasks.values():
        listed = ", ".join(f"{name} {position}" for name, position in tasks.values()) or "none"
        raise _fault(
            f"says that this process is {task_type} {index}, which is not in its cluster; expected one of: {listed}"
        )
    # Insertion order is the order of the ranks.
    rank = list(tasks.values()).index((task_type, index))
    return rank, list(tasks)


def _add_task(tasks: dict[_Address, _Task], task: _Task, text: Any) -> None:
    name, position = task
    try:
        if not isinstance(text, str):
            raise ValueError(text)
        address = address_and_port(text)
    except ValueError:
        expected = 'expected "host:port", or "[address]:port" for IPv6'
        raise _fault(f"has {text!r} for cluster.{name}[{position}]; {expected}") from None
    twin = tasks.setdefault(address, task)
    if twin != task:
        twins = f"gives {twin[0]} {twin[1]} and {name} {position} the same address {text!r}"
        raise _fault(f"{twins}; expected different ones")


def _task(config: dict[str, Any]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict):
        raise _fault(f"has the task {task!r}; expected an object with type and index")
    task_type = task.get("type")
    index = task.get("index", 0)
    if not isinstance(task_type, str) or not task_type:
        raise _fault(
            f"has the task type {task_type!r}; expected chief, master, worker or evaluator"
        )
    # Kubernetes may write the index as text.
    if isinstance(index, bool) or not str(index).isdecimal():
        raise _fault(f"has the task index {index!r}; expected a whole number from 0")
    return task_type, int(index)


def _fault(problem: str) -> ClusterError:
    return ClusterError(
        f"TF_CONFIG {problem}.\nWhat to do: correct it; with two workers, for example, worker 0 has\n  {_EXAMPLE}"
    )
