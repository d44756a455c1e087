"""What the environment tells this process about the job, before anybody has met.

Three schemes, in this order: rank table, ``CM_*``, ``TF_CONFIG``. The first one that is there counts; contradictions
and gaps raise. ``rendezvous`` makes the agreed description out of it.
"""

from __future__ import annotations

import logging
import re
import zlib
from dataclasses import dataclass

from npu_device import environment
from npu_device.cluster import rank_table, table_fields, table_free, tf_config
from npu_device.cluster.errors import ClusterError
from npu_device.cluster.rank_table import Entry, RankTable

# Above the range from which Linux takes the ports of outgoing connections (32768 to 60999).
_FIRST_PORT, _PORTS = 61000, 4000

_log = logging.getLogger("npu_device")


@dataclass(frozen=True)
class Membership:
    """This process's place in the job, as far as it is known beforehand.

    Attributes:
        scheme: "rank table", "CM_*" or "TF_CONFIG".
        world_size: number of ranks, 2 or more.
        rank: this process's rank; None when the chief numbers the ranks (CM_*).
        host: address at which the other ranks reach this one; None for the local end of its connection to the chief.
        host_key: name of this process's host, by which ranks are grouped; "" for the address that the chief sees.
        device_id: number of this process's device on its host.
        is_chief: True when the others come to this process.
        chief_hosts: addresses or names of the chief's host, in the order in which they are tried.
        chief_port: port on which the chief listens.
        job_id: name of the job.
        connect_timeout: seconds that the ranks wait for each other.
        expected_hosts: host of each rank where the scheme tells it, else empty; for messages.
    """

    scheme: str
    world_size: int
    rank: int | None
    host: str | None
    host_key: str
    device_id: int
    is_chief: bool
    chief_hosts: tuple[str, ...]
    chief_port: int
    job_id: str
    connect_timeout: float
    expected_hosts: tuple[str, ...] = ()


def world_size_from_environment() -> int:
    """Number of ranks that the environment names; 1 when it names none. Cheap, and nobody is asked.

    Raises:
        ClusterError: the variables contradict each other, or one is missing.
        ValueError: a variable is malformed, or both RANK_SIZE and CM_WORKER_SIZE are set.
    """
    rank_size, worker_size = environment.RANK_SIZE.get(), environment.CM_WORKER_SIZE.get()
    if rank_size is not None and worker_size is not None:
        raise ValueError(
            f"both RANK_SIZE ({rank_size}) and CM_WORKER_SIZE ({worker_size}) are set: the first belongs to a rank "
            "table, the second to a job without one.\nWhat to do: unset the one whose scheme is not meant."
        )
    if rank_size is not None:
        if rank_size == 1 and not environment.RANK_TABLE_FILE.is_set():
            _require_agreement(rank_size)
        return rank_size
    if worker_size is not None:
        return worker_size
    if environment.RANK_TABLE_FILE.is_set():
        table = _load_table()
        if table.size > 1:
            raise _missing("RANK_SIZE", f"the rank table {table.path} lists {table.size} ranks", str(table.size))
        return 1
    if environment.CM_CHIEF_IP.is_set():
        raise _missing("CM_WORKER_SIZE", "CM_CHIEF_IP is set", "the number of ranks")
    config = tf_config.read()
    return 1 if config is None else config.size


def membership_from_environment(device_id: int | None = None) -> Membership | None:
    """What the environment says about this process; None when it is alone.

    Args:
        device_id: number of the device; default ASCEND_DEVICE_ID, then DEVICE_ID, then the local rank.

    Raises:
        ClusterError: the variables contradict each other, one is missing, or the rank table is faulty.
        ValueError: a variable is malformed.
    """
    size = world_size_from_environment()
    if size == 1:
        return None
    table, chief = environment.RANK_TABLE_FILE, environment.CM_CHIEF_IP
    if table.is_set() and chief.is_set():
        raise ClusterError(
            f"both CM_CHIEF_IP ({chief.raw()}) and RANK_TABLE_FILE ({table.raw()}) are set, and they are two different "
            "ways to describe a job.\nWhat to do: unset the one that is not meant."
        )
    if device_id is None:
        device_id = environment.ASCEND_DEVICE_ID.get()
    if device_id is None:
        device_id = environment.DEVICE_ID.get()
    if not re.fullmatch(r"[A-Za-z0-9_-]+", environment.JOB_ID.get()):
        _log.warning("JOB_ID is %r; Ascend allows letters, digits, - and _ only", environment.JOB_ID.get())
    if table.is_set():
        return _from_rank_table(size, device_id)
    if chief.is_set() or environment.CM_WORKER_SIZE.is_set():
        return _from_table_free(size, device_id or 0)
    return _from_tf_config(size, device_id)


# Rank table


def _load_table() -> RankTable:
    return rank_table.load(environment.RANK_TABLE_FILE.raw() or "", environment.HCCL_CONNECT_TIMEOUT.get())


def _from_rank_table(size: int, device_id: int | None) -> Membership:
    table = _load_table()
    if not environment.RANK_SIZE.is_set():
        raise _missing(
            "RANK_SIZE", f"RANK_TABLE_FILE is set (CM_WORKER_SIZE={size} belongs to a job without it)", str(table.size)
        )
    if table.size != size:
        raise table_fields.fault(
            table.path, f"it lists {table.size} ranks, and RANK_SIZE is {size}; expected the same number"
        )
    mine = _find(table, device_id)
    chief = table.entries[0]
    if table.servers == 1:
        chief_hosts: tuple[str, ...] = ("127.0.0.1",)
    else:
        given = (chief.host_ip, chief.server, chief.device_ip)
        chief_hosts = tuple(dict.fromkeys(host for host in given if host))
    job_id = environment.JOB_ID.get()
    computed = _FIRST_PORT + zlib.crc32(job_id.encode(), table.checksum) % _PORTS
    if device_id is None:
        device_id = [entry.rank for entry in table.entries if entry.server == mine.server].index(mine.rank)
    return Membership(
        scheme="rank table",
        world_size=size,
        rank=mine.rank,
        host=environment.HCCL_IF_IP.get(),
        host_key=mine.server,
        device_id=device_id,
        is_chief=mine.rank == 0,
        chief_hosts=chief_hosts,
        chief_port=chief.host_port or environment.HCCL_IF_BASE_PORT.get() or computed,
        job_id=job_id,
        connect_timeout=environment.HCCL_CONNECT_TIMEOUT.get(),
        expected_hosts=tuple(entry.server for entry in table.entries),
    )


def _find(table: RankTable, device_id: int | None) -> Entry:
    """The entry of this process: by RANK_ID, or by its pod in a table of pods."""
    text = environment.RANK_ID.raw()
    if table.of_pods:
        if environment.POD_NAME.is_set():
            return _find_in_pod(table, "POD_NAME", environment.POD_NAME.get() or "", device_id)
        if text is not None and not text.strip().isdecimal():
            return _find_in_pod(table, "RANK_ID", text.strip(), device_id)
    rank = environment.RANK_ID.get()
    if rank is None:
        raise _missing(
            "RANK_ID",
            f"RANK_TABLE_FILE and RANK_SIZE ({table.size}) are set",
            f"this process's rank, 0 to {table.size - 1}",
        )
    if rank >= table.size:
        raise table_fields.fault(
            table.path, f"RANK_ID {rank} is not in it; expected one of its ranks, 0 to {table.size - 1}"
        )
    return table.entries[rank]


def _find_in_pod(table: RankTable, variable: str, pod: str, device_id: int | None) -> Entry:
    entries = [entry for entry in table.entries if entry.pod == pod]
    if not entries:
        known = ", ".join(dict.fromkeys(entry.pod for entry in table.entries if entry.pod is not None)) or "none"
        raise table_fields.fault(table.path, f"{variable} {pod!r} is not in it; expected one of its pods: {known}")
    if len(entries) == 1:
        return entries[0]
    # Several processes share the pod: its device tells which one this is.
    for entry in entries:
        if entry.device_id == device_id:
            return entry
    devices = ", ".join(str(entry.device_id) for entry in entries)
    found = "is not set" if device_id is None else f"is {device_id}"
    raise ClusterError(
        f"pod {pod!r} has {len(entries)} devices in the rank table {table.path}, and ASCEND_DEVICE_ID {found}; "
        f"expected one of {devices}.\n"
        "What to do: start one process a device in the pod, each with its own ASCEND_DEVICE_ID."
    )


# CM_*


def _from_table_free(size: int, device_id: int) -> Membership:
    found = table_free.read(device_id)
    host = environment.HCCL_IF_IP.get() or found.worker_ip
    return Membership(
        scheme="CM_*",
        world_size=size,
        rank=None,
        host=host or (found.chief_ip if found.is_chief else None),
        host_key=found.worker_ip or (found.chief_ip if found.is_chief else ""),
        device_id=device_id,
        is_chief=found.is_chief,
        chief_hosts=(found.chief_ip,),
        chief_port=found.chief_port,
        job_id=environment.JOB_ID.get(),
        connect_timeout=environment.HCCL_CONNECT_TIMEOUT.get(),
    )


# TF_CONFIG


def _from_tf_config(size: int, device_id: int | None) -> Membership:
    config = tf_config.read()
    if config is None:
        raise ClusterError(
            f"RANK_SIZE is {size}, but nothing says who and where the {size} ranks are.\n"
            "What to do: describe the job in one of three ways\n"
            "  with a rank table: RANK_TABLE_FILE, RANK_ID and RANK_SIZE\n"
            "  without one: CM_CHIEF_IP, CM_CHIEF_PORT, CM_CHIEF_DEVICE, CM_WORKER_SIZE and CM_WORKER_IP\n"
            "  TensorFlow's way: TF_CONFIG\n"
            f"or let the launcher do it: npurun -n {size} train.py. To train on a single device, unset RANK_SIZE."
        )
    _require_agreement(size)
    host = config.hosts[config.rank]
    if device_id is None:
        device_id = config.hosts[: config.rank].count(host)
    return Membership(
        scheme="TF_CONFIG",
        world_size=size,
        rank=config.rank,
        host=environment.HCCL_IF_IP.get(),
        host_key=host,
        device_id=device_id,
        is_chief=config.rank == 0,
        chief_hosts=(config.hosts[0],),
        chief_port=config.ports[0],
        job_id=environment.JOB_ID.get(),
        connect_timeout=environment.HCCL_CONNECT_TIMEOUT.get(),
        expected_hosts=config.hosts,
    )


def _require_agreement(size: int) -> None:
    """RANK_SIZE and RANK_ID may stand beside TF_CONFIG when they say the same."""
    config = tf_config.read()
    if config is None:
        return
    rank = environment.RANK_ID.get()
    if config.size != size or (rank is not None and rank != config.rank):
        raise ClusterError(
            f"RANK_SIZE ({size}) and RANK_ID ({'unset' if rank is None else rank}) contradict TF_CONFIG: "
            f"by TF_CONFIG this process is rank {config.rank} of {config.size}.\n"
            "What to do: unset the variables that are not meant; TF_CONFIG alone is enough."
        )


def _missing(variable: str, because: str, value: str) -> ClusterError:
    return ClusterError(f"{variable} is missing or empty, while {because}.\nWhat to do: set {variable} to {value}.")
