"""Ascend's rank tables, in all four forms: the ranks of the job according to the file ``RANK_TABLE_FILE``.

Versions 1.0 and 1.2 (``server_list``), and the older cloud and lab forms (``group_list``). Which of the ranks this
process is, and where the ranks meet, is left to ``schemes``.

Source: Ascend HCCL user guide, cluster information configuration (rank table).
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from npu_device._src.cluster.errors import ClusterError
from npu_device._src.membership import table_fields
from npu_device._src.membership.table_fields import Fields

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Entry:
    """One device of the table, which is one rank.

    Attributes:
        rank: its rank.
        server: server_id of its server.
        device_id: number of the device on its server.
        host_ip: address or name of the server, if given.
        device_ip: address of the device, if given.
        host_port: port of the server for this rank, if given.
        pod: name of its pod, in tables of pods.
        place: its location in the file, for messages.
    """

    rank: int
    server: str
    device_id: int
    host_ip: str | None
    device_ip: str | None
    host_port: int | None
    pod: str | None
    place: str


@dataclass(frozen=True)
class RankTable:
    """A valid table.

    Attributes:
        path: path of the file.
        entries: one for each rank, in the order of the ranks.
        of_pods: True for the forms with ``group_list``, in which a process may be named by its pod.
        checksum: the same for equal tables, whatever their formatting.
    """

    path: str
    entries: tuple[Entry, ...]
    of_pods: bool
    checksum: int

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.entries)


def load(path: str, timeout: float) -> RankTable:
    """Read a table and check it.

    Args:
        path: path of the file.
        timeout: seconds to wait for a table whose status is "initializing": schedulers create a file and fill it later.

    Raises:
        ClusterError: the file can't be read, breaks a rule, or wasn't completed in time (Ascend's EI0004).
    """
    deadline = time.monotonic() + timeout
    filling = False
    while True:
        try:
            table = table_fields.load_object(path)
            if table.text("status", '"completed" or "initializing"') != "initializing":
                return _read(table)
            filling = True
        except ClusterError:
            # The scheduler may be in the middle of writing; only a table seen as "initializing" is read again.
            if not filling or time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise table_fields.fault(
                path,
                f'status is still "initializing" after {timeout:g} s (HCCL_CONNECT_TIMEOUT); expected "completed": '
                "the scheduler hasn't finished the table",
            )
        time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def _read(table: Fields) -> RankTable:
    if table.content["status"] != "completed":
        raise table.wrong("status", '"completed" or "initializing"')
    if "server_list" in table:
        entries = _read_servers(table)
    elif "group_list" in table:
        entries = _read_groups(table)
    else:
        raise table.wrong("server_list", "a list of servers (or group_list, in the older forms)")
    entries.sort(key=lambda entry: entry.rank)
    _check_ranks(table.path, entries)
    _check_devices(table.path, entries)
    normalised = json.dumps(table.content, sort_keys=True, separators=(",", ":"))
    return RankTable(table.path, tuple(entries), "server_list" not in table, zlib.crc32(normalised.encode()))


# Version 1.0 and 1.2


def _read_servers(table: Fields) -> list[Entry]:
    version = table.text("version", '"1.0" or "1.2"')
    if version not in ("1.0", "1.2"):
        raise table.wrong("version", '"1.0" or "1.2"')
    servers = table.objects("server_list")
    table.counts("server_count", len(servers), "entries of server_list")
    entries: list[Entry] = []
    names: list[str] = []
    for server in servers:
        name = server.text("server_id", "text of 1 to 64 characters", limit=64)
        if name in names:
            raise server.wrong("server_id", f"another one: server_list[{names.index(name)}] has the same")
        names.append(name)
        for device in server.objects("device"):
            if version == "1.2":
                device.text("super_device_id", "text that is not empty (version 1.2)")
            entries.append(_entry(device, _rank(device), name, server.optional_text("host_ip"), None))
    if version == "1.2":
        _check_super_pods(table, names)
    return entries


def _check_super_pods(table: Fields, servers: list[str]) -> None:
    pod_of: dict[str, str] = {}
    for pod in table.objects("super_pod_list"):
        pod_id = pod.text("super_pod_id", "text that is not empty")
        for server in pod.objects("server_list"):
            name = server.text("server_id", "a server_id of server_list")
            if name not in servers:
                raise server.wrong("server_id", "a server_id of server_list")
            if name in pod_of:
                raise server.wrong("server_id", f"another one: the server is in {pod_of[name]!r} already")
            pod_of[name] = pod_id
    for index, name in enumerate(servers):
        if name not in pod_of:
            place = f"server_list[{index}].server_id"
            raise table_fields.fault(table.path, f"{place} {name!r} is in no super pod; expected in exactly one")
    order = [pod_of[name] for name in servers]
    for index in range(1, len(order)):
        if order[index] != order[index - 1] and order[index] in order[:index]:
            place = f"server_list[{index}].server_id"
            what = f"{place} {servers[index]!r} is not next to the other servers of super pod {order[index]!r}"
            raise table_fields.fault(table.path, f"{what}; expected them together")


# The older cloud form (pods) and lab form


def _read_groups(table: Fields) -> list[Entry]:
    groups = table.objects("group_list")
    table.counts("group_count", len(groups), "entries of group_list")
    # All groups together make up the world, in file order.
    devices: list[tuple[Fields, Fields]] = []
    for group in groups:
        instances = group.objects("instance_list")
        group.counts("instance_count", len(instances), "entries of instance_list")
        before = len(devices)
        for instance in instances:
            devices += [(instance, device) for device in instance.objects("devices")]
        group.counts("device_count", len(devices) - before, "devices of the group")
    lab = any("rank_id" in instance for instance, _ in devices)
    entries = []
    for position, (instance, device) in enumerate(devices):
        rank = _rank(instance) if lab else position
        server = instance.text("server_id", "text of 1 to 64 characters", limit=64)
        pod = instance.optional_text("pod_name") if lab else instance.text("pod_name", "the pod's name")
        entries.append(_entry(device, rank, server, instance.optional_text("host_ip"), pod))
    return entries


# Common to all forms


def _rank(holder: Fields) -> int:
    return holder.number("rank_id", "a whole number from 0")


def _entry(device: Fields, rank: int, server: str, host_ip: str | None, pod: str | None) -> Entry:
    return Entry(
        rank=rank,
        server=server,
        device_id=device.number("device_id", "a whole number from 0"),
        host_ip=host_ip,
        device_ip=device.optional_address("device_ip"),
        host_port=device.optional_port("host_port"),
        pod=pod,
        place=device.place("")[:-1],
    )


def _check_ranks(path: str, entries: Sequence[Entry]) -> None:
    for expected, entry in enumerate(entries):
        if entry.rank == expected:
            continue
        if expected > 0 and entry.rank == entries[expected - 1].rank:
            other = entries[expected - 1].place
            raise table_fields.fault(
                path, f"rank {entry.rank} appears twice, in {other} and {entry.place}; expected once"
            )
        raise table_fields.fault(
            path,
            f"rank {expected} is missing, while {entry.place} is rank {entry.rank}; "
            f"expected the {len(entries)} ranks 0 to {len(entries) - 1} without gaps",
        )
    finished: set[str] = set()
    for before, entry in zip(entries, entries[1:]):
        if entry.server != before.server:
            finished.add(before.server)
        if entry.server in finished:
            what = f"{entry.place} is rank {entry.rank} on server {entry.server!r}, after rank {before.rank} on another"
            raise table_fields.fault(path, f"{what}; expected each server's ranks to be consecutive")


def _check_devices(path: str, entries: Sequence[Entry]) -> None:
    seen: dict[tuple[str, int], Entry] = {}
    for entry in entries:
        other = seen.setdefault((entry.server, entry.device_id), entry)
        if other is not entry:
            what = f"device_id {entry.device_id} of server {entry.server!r} appears twice"
            raise table_fields.fault(path, f"{what}, in {other.place} and {entry.place}; expected one rank per device")
    addressed = [entry for entry in entries if entry.device_ip is not None]
    for first, entry in zip(addressed, addressed[1:]):
        if (":" in str(first.device_ip)) != (":" in str(entry.device_ip)):
            what = f"{first.place}.device_ip is {first.device_ip!r} and {entry.place}.device_ip is {entry.device_ip!r}"
            raise table_fields.fault(path, f"{what}; expected addresses of one family, IPv4 or IPv6")
