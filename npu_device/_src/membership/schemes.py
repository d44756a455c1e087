"""Read the description of the job from the environment, before the ranks have met.

The first of four schemes is used: rank table, ``CM_*``, ``TF_CONFIG``, a launcher of clusters. Contradictions raise.
"""

from __future__ import annotations

import logging
import re
import socket
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.description import Membership
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.environment import Variable
from npu_device._src.membership import launchers, parent_rank, rank_table, tf_config
from npu_device._src.membership.interfaces import announced_address, is_own
from npu_device._src.membership.launchers import Launched
from npu_device._src.membership.rank_table import RankTable, TableDevice

# The range lies above the ports that Linux uses for outgoing connections (32768 to 60999).
_PORTS = (61000, 64999)

_log = logging.getLogger("npu_device")


def world_size_from_environment() -> int:
    """Return the number of ranks in the environment; 1 if it describes no job. Contacts no other rank.

    Raises:
        ClusterError, ValueError: its variables contradict each other.
    """
    return _size_and_launcher()[0]


def _size_and_launcher() -> tuple[int, Launched | None]:
    """Return the number of ranks, and what a launcher says; Ascend's variables, TF_CONFIG and it may not differ."""
    size = _size_by_ascends_variables()
    config = tf_config.read()
    if config is not None:
        size = size or config.world_size
        _require_agreement(size, None)
    launched = launchers.read()
    if launched is None:
        # If nothing gives the processes ranks, each of them would train alone.
        if size in (None, 1):
            launchers.require_single()
        return size or 1, None
    if size is not None:
        launchers.require_agreement("by Ascend's variables or TF_CONFIG", size, None, launched)
    return size or launched.size, launched


def _size_by_ascends_variables() -> int | None:
    rank_size = environment.RANK_SIZE.get()
    worker_size = environment.CM_WORKER_SIZE.get()
    if rank_size is not None and worker_size is not None:
        raise ValueError(
            f"both RANK_SIZE ({rank_size}) and CM_WORKER_SIZE ({worker_size}) are set: the first belongs to a rank "
            "table, the second to a job without one.\nWhat to do: unset the one whose scheme you don't use."
        )
    # Either variable has the number of ranks, 1 or more; which scheme counts is decided later.
    if rank_size or worker_size:
        return rank_size or worker_size
    if environment.RANK_TABLE_FILE.is_set():
        table = _load_table()
        if table.size > 1:
            raise _unset(
                "RANK_SIZE",
                f"the rank table {table.path} lists {table.size} ranks",
                str(table.size),
            )
        return 1
    if environment.CM_CHIEF_IP.is_set():
        raise _unset("CM_WORKER_SIZE", "CM_CHIEF_IP is set", "the number of ranks")
    return None


def membership_from_environment(device_id: int | None = None) -> Membership | None:
    """Return what the environment says about this process; None if it runs alone."""
    size, launched = _size_and_launcher()
    if size == 1:
        return None
    table = environment.RANK_TABLE_FILE
    chief = environment.CM_CHIEF_IP
    if table.is_set() and chief.is_set():
        raise ClusterError(
            f"both CM_CHIEF_IP ({chief.raw()}) and RANK_TABLE_FILE ({table.raw()}) are set, and they are two different "
            "ways to describe a job.\nWhat to do: unset the one you don't use."
        )
    # A script that chooses its device may choose its rank by that: then it is no child of a process with other ranks.
    is_chosen = device_id is not None and not environment.RANK_ID.is_set()
    if device_id is None:
        device_id = environment.ASCEND_DEVICE_ID.get()
    # DEVICE_ID is the older name of the variable.
    if device_id is None:
        device_id = environment.DEVICE_ID.get()
    if not re.fullmatch(r"[A-Za-z0-9_-]+", environment.JOB_ID.get()):
        _log.warning(
            "JOB_ID is %r; Ascend allows letters, digits, - and _ only", environment.JOB_ID.get()
        )
    if table.is_set():
        membership = _from_rank_table(size, device_id)
    elif chief.is_set() or environment.CM_WORKER_SIZE.is_set():
        membership = _without_table(size, device_id or 0)
    elif launched is not None and launched.size == size and tf_config.read() is None:
        membership = _from_launcher(launched, device_id)
    else:
        membership = _from_tf_config(size, device_id)
    rank = membership.rank
    # A rank table has been read by RANK_ID, which otherwise may contradict the description.
    if rank is not None and environment.RANK_ID.is_set() and not table.is_set():
        rank = environment.RANK_ID.get()
    _require_agreement(size, rank)
    if launched is not None:
        launchers.require_agreement(f"by {membership.scheme} and RANK_ID", size, rank, launched)
    candidate = None
    if not is_chosen:
        candidate = parent_rank.candidate()
    under_mpiexec = launched is not None and launched.launcher in launchers.MPI_LAUNCHERS
    return replace(
        membership,
        host=announced_address() or membership.host,
        # The environment's secret wins over one that the launcher's ranks have made themselves.
        secret=secret() or membership.secret,
        under_mpiexec=under_mpiexec,
        candidate=candidate,
    )


def secret() -> bytes:
    """Return the job secret; empty if none is set."""
    path = environment.NPU_DEVICE_SECRET_FILE.get()
    text = environment.NPU_DEVICE_SECRET.get()
    if path is None:
        return (text or "").encode()
    if text is not None:
        raise ClusterError(
            "both NPU_DEVICE_SECRET_FILE and NPU_DEVICE_SECRET are set.\nWhat to do: unset the one you don't use."
        )
    try:
        content = Path(path).read_bytes().strip()
    except OSError as error:
        raise ClusterError(
            f"NPU_DEVICE_SECRET_FILE is {path!r}, which can't be read: {error.strerror}.\n"
            "What to do: give every rank a path that its user can read."
        ) from error
    if not content:
        raise ClusterError(
            f"NPU_DEVICE_SECRET_FILE is {path!r}, and the file is empty.\n"
            "What to do: write random text into it, the same on every host (openssl rand -hex 32)."
        )
    return content


def _load_table() -> RankTable:
    path = environment.RANK_TABLE_FILE.raw() or ""
    return rank_table.load(path, environment.HCCL_CONNECT_TIMEOUT.get())


def _from_rank_table(size: int, device_id: int | None) -> Membership:
    table = _load_table()
    if not environment.RANK_SIZE.is_set():
        reason = f"RANK_TABLE_FILE is set (CM_WORKER_SIZE={size} belongs to a job without it)"
        raise _unset("RANK_SIZE", reason, str(table.size))
    if table.size != size:
        raise rank_table.fault(
            table.path,
            f"it lists {table.size} ranks, and RANK_SIZE is {size}; expected the same number",
        )
    device = _find(table, device_id)
    chief = table.devices[0]
    servers = tuple(device.server_id for device in table.devices)
    # Ranks of one host meet on the loopback, whatever the table says of networks.
    chief_hosts: tuple[str | None, ...] = ("127.0.0.1",)
    if len(set(servers)) > 1:
        # Not every table gives addresses of hosts, but the id of a server may be its address.
        chief_hosts = (chief.host_ip, chief.server_id, chief.device_ip)
    # Repetitions are dropped, as an id of a server is often its address.
    distinct_hosts = dict.fromkeys(host for host in chief_hosts if host)
    job_id = environment.JOB_ID.get()
    checksum = zlib.crc32(job_id.encode(), table.checksum)
    # The default device is the position of the rank on its server, since servers have consecutive ranks.
    if device_id is None:
        device_id = device.rank - servers.index(device.server_id)
    return Membership(
        scheme="rank table",
        world_size=size,
        rank=device.rank,
        host=None,
        host_key=device.server_id,
        device_id=device_id,
        is_chief=device.rank == 0,
        chief_hosts=tuple(distinct_hosts),
        chief_port=chief.host_port or _computed_port(checksum),
        job_id=job_id,
        expected_hosts=servers,
    )


def _computed_port(checksum: int) -> int:
    """Return a port that all ranks of the job compute alike, and other jobs on the host probably not."""
    lowest, highest = environment.NPU_DEVICE_PORT_RANGE.get() or _PORTS
    # Neighbouring jobs have different checksums, and so most likely different ports.
    return environment.HCCL_IF_BASE_PORT.get() or lowest + checksum % (highest - lowest + 1)


def _find(table: RankTable, device_id: int | None) -> TableDevice:
    """Return the device of this process, by its pod or its rank."""
    # In tables of pods, RANK_ID may hold the name of the pod.
    variable: Variable[Any] = environment.RANK_ID
    if environment.POD_NAME.is_set():
        variable = environment.POD_NAME
    name = (variable.raw() or "").strip()
    is_pod = variable is environment.POD_NAME or not name.isdecimal()
    if table.has_pods and name and is_pod:
        return _find_in_pod(table, variable.name, name, device_id)
    rank = environment.RANK_ID.get()
    highest = table.size - 1
    if rank is None:
        reason = f"RANK_TABLE_FILE and RANK_SIZE ({table.size}) are set"
        raise _unset("RANK_ID", reason, f"the rank of this process, 0 to {highest}")
    if rank > highest:
        raise rank_table.fault(
            table.path, f"RANK_ID {rank} is not in it; expected one of its ranks, 0 to {highest}"
        )
    return table.devices[rank]


def _find_in_pod(table: RankTable, variable: str, pod: str, device_id: int | None) -> TableDevice:
    devices = [device for device in table.devices if device.pod == pod]
    if not devices:
        pods = dict.fromkeys(device.pod for device in table.devices)
        expected = ", ".join(filter(None, pods)) or "none"
        raise rank_table.fault(
            table.path, f"{variable} {pod!r} is not in it; expected one of its pods: {expected}"
        )
    # The device tells apart several processes that share the pod.
    for device in devices:
        if len(devices) == 1 or device.device_id == device_id:
            return device
    expected = ", ".join(str(device.device_id) for device in devices)
    state = "is not set"
    if device_id is not None:
        state = f"is {device_id}"
    raise ClusterError(
        f"pod {pod!r} has {len(devices)} devices in the rank table {table.path}, and ASCEND_DEVICE_ID {state}; "
        f"expected one of {expected}.\n"
        "What to do: start one process per device in the pod, each with its own ASCEND_DEVICE_ID."
    )


def _without_table(size: int, device_id: int) -> Membership:
    """Return the place of this process; the hub numbers the ranks when all have come, see ``roster``.

    Source: Ascend environment variables reference, CM_CHIEF_IP and the following pages.
    """
    required = (
        environment.CM_CHIEF_IP,
        environment.CM_CHIEF_PORT,
        environment.CM_CHIEF_DEVICE,
        environment.CM_WORKER_SIZE,
    )
    unset = [variable.name for variable in required if not variable.is_set()]
    if unset:
        names = ", ".join(unset)
        verb = "is"
        if len(unset) > 1:
            verb = "are"
        raise ClusterError(
            f"{names} {verb} missing or empty: CM_CHIEF_IP, CM_CHIEF_PORT, "
            "CM_CHIEF_DEVICE and CM_WORKER_SIZE together describe a job without a rank table "
            "(RANK_SIZE belongs to one with a table).\n"
            f"What to do: set {names} on every rank, with the same value everywhere."
        )
    worker_ip = environment.CM_WORKER_IP.get()
    chief_ip = environment.CM_CHIEF_IP.get()
    chief_port = environment.CM_CHIEF_PORT.get()
    assert chief_ip is not None and chief_port is not None
    if worker_ip is not None and (":" in worker_ip) != (":" in chief_ip):
        raise ValueError(
            f"EI0001: the environment variable CM_WORKER_IP is {worker_ip!r} and CM_CHIEF_IP is {chief_ip!r}; "
            "expected addresses of one family, IPv4 or IPv6.\n"
            "What to do: give both in the family that the hosts use to reach each other."
        )
    # Without CM_WORKER_IP, this rank is on the host of the chief if the chief's address is one of this host.
    on_chief_host = worker_ip == chief_ip or (worker_ip is None and is_own(chief_ip))
    is_chief = on_chief_host and device_id == environment.CM_CHIEF_DEVICE.get()
    host = worker_ip
    if is_chief:
        host = chief_ip
    return Membership(
        scheme="CM_*",
        world_size=size,
        rank=None,
        host=host,
        host_key=host or "",
        device_id=device_id,
        is_chief=is_chief,
        chief_hosts=(chief_ip,),
        chief_port=chief_port,
    )


def _from_tf_config(size: int, device_id: int | None) -> Membership:
    config = tf_config.read(device_id)
    if config is None:
        raise ClusterError(
            f"RANK_SIZE is {size}, but nothing says what the {size} ranks are and where they run.\n"
            "What to do: describe the job in one of four ways:\n"
            "  with a rank table: RANK_TABLE_FILE, RANK_ID and RANK_SIZE\n"
            "  without one: CM_CHIEF_IP, CM_CHIEF_PORT, CM_CHIEF_DEVICE, CM_WORKER_SIZE and CM_WORKER_IP\n"
            "  TensorFlow's way: TF_CONFIG\n"
            "  torchrun's way: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT\n"
            f"or let the launcher do it: npurun -n {size} train.py. To train on a single device, unset RANK_SIZE."
        )
    return config


def _from_launcher(launched: Launched, device_id: int | None) -> Membership:
    hosts, port, made_secret = launchers.rendezvous_address(launched)
    # Job names may hold characters that the hub doesn't take.
    job_id = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{launched.launcher} {launched.job_name}".strip())
    if environment.JOB_ID.is_set():
        job_id = environment.JOB_ID.get()
    if device_id is None:
        device_id = launched.local_rank or 0
    checksum = zlib.crc32(f"{job_id} {launched.job_name}".encode())
    return Membership(
        scheme=launched.launcher,
        world_size=launched.size,
        rank=launched.rank,
        host=None,
        host_key=launched.node_name or socket.gethostname(),
        device_id=device_id,
        is_chief=launched.rank == 0,
        chief_hosts=hosts,
        chief_port=port or _computed_port(checksum),
        job_id=job_id,
        secret=made_secret,
    )


def _require_agreement(size: int, rank: int | None) -> None:
    """Check the number of ranks, and a rank if it is known, against TF_CONFIG."""
    config = tf_config.read()
    has_table = environment.RANK_TABLE_FILE.is_set()
    has_chief = environment.CM_WORKER_SIZE.is_set()
    # A platform describes the only process that it starts as a cluster of one, and that process may start ranks.
    if config is None or (config.world_size == 1 and (has_table or has_chief)):
        return
    if config.world_size == size and rank in (None, config.rank):
        return
    sources = f"RANK_SIZE ({size}) and RANK_ID ({environment.RANK_ID.raw() or 'unset'})"
    if has_table:
        sources = f"the rank table {environment.RANK_TABLE_FILE.raw()}, {sources}"
    elif has_chief:
        sources = f"CM_CHIEF_IP ({environment.CM_CHIEF_IP.raw()}) and CM_WORKER_SIZE ({size})"
    raise ClusterError(
        f"{sources} contradict TF_CONFIG: by TF_CONFIG this process is rank {config.rank} of {config.world_size}.\n"
        "What to do: unset the variables you don't use; TF_CONFIG alone is enough."
    )


def _unset(variable: str, reason: str, remedy: str) -> ClusterError:
    return ClusterError(
        f"{variable} is missing or empty, while {reason}.\nWhat to do: set {variable} to {remedy}."
    )
