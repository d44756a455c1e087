"""Ascend's rank tables, in all four forms: versions 1.0 and 1.2 (``server_list``), older cloud and lab
(``group_list``).

Source: Ascend HCCL user guide, cluster information configuration (rank table).
"""

from __future__ import annotations

import ipaddress
import json
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.time_limits import TABLE_POLL_SECONDS


@dataclass(frozen=True)
class Entry:
    """One device of the table, which is one rank."""

    rank: int
    server: str  # server_id of its server
    device_id: int
    host_ip: str | None  # address or name of the server, if given
    device_ip: str | None  # address of the device, if given
    host_port: int | None  # port of the server for this rank, if given
    pod: str | None  # name of its pod, in tables of pods
    place: str  # its location in the file, for messages


@dataclass(frozen=True)
class RankTable:
    """A valid table."""

    path: str
    entries: tuple[Entry, ...]
    of_pods: bool  # True for the forms with ``group_list``, in which a process may be named by its pod
    checksum: int  # the same for equal tables, whatever their formatting

    @property
    def size(self) -> int:
        return len(self.entries)


def load(path: str, timeout: float) -> RankTable:
    """Read a table and check it; ClusterError (EI0004) if it can't be read, breaks a rule, or isn't completed."""
    deadline = time.monotonic() + timeout
    filling = False
    while True:
        try:
            table = load_object(path)
            if table.text("status", '"completed" or "initializing"') != "initializing":
                return _read(table)
            filling = True
        except ClusterError:
            # The scheduler may be in the middle of writing; only a table seen as "initializing" is read again.
            if not filling or time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise fault(
                path,
                f'status is still "initializing" after {timeout:g} s (HCCL_CONNECT_TIMEOUT); expected "completed": '
                "the scheduler hasn't finished the table",
            )
        time.sleep(min(TABLE_POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def _read(table: Fields) -> RankTable:
    if table.content["status"] != "completed":
        raise table.wrong("status", '"completed" or "initializing"')
    if "server_list" in table.content:
        entries = _read_servers(table)
    elif "group_list" in table.content:
        entries = _read_groups(table)
    else:
        raise table.wrong("server_list", "a list of servers (or group_list, in the older forms)")
    entries.sort(key=lambda entry: entry.rank)
    _check_ranks(table.path, entries)
    _check_devices(table.path, entries)
    normalised = json.dumps(table.content, sort_keys=True, separators=(",", ":"))
    return RankTable(table.path, tuple(entries), "server_list" not in table.content, zlib.crc32(normalised.encode()))


def _read_servers(table: Fields) -> list[Entry]:  # versions 1.0 and 1.2
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
            entries.append(_entry(device, device.number("rank_id"), name, server.optional_text("host_ip"), None))
    return entries


def _read_groups(table: Fields) -> list[Entry]:  # the older cloud form (pods), and the lab form
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
    lab = any("rank_id" in instance.content for instance, _ in devices)
    entries = []
    for position, (instance, device) in enumerate(devices):
        rank = instance.number("rank_id") if lab else position
        server = instance.text("server_id", "text of 1 to 64 characters", limit=64)
        pod = instance.optional_text("pod_name") if lab else instance.text("pod_name", "the pod's name")
        entries.append(_entry(device, rank, server, instance.optional_text("host_ip"), pod))
    return entries


def _entry(device: Fields, rank: int, server: str, host_ip: str | None, pod: str | None) -> Entry:
    return Entry(
        rank=rank,
        server=server,
        device_id=device.number("device_id"),
        host_ip=host_ip,
        device_ip=device.optional_address("device_ip"),
        host_port=device.number("host_port", "a port from 1 to 65535", 1, 65535) if device.has("host_port") else None,
        pod=pod,
        place=device.place("")[:-1],
    )


def _check_ranks(path: str, entries: Sequence[Entry]) -> None:
    for expected, entry in enumerate(entries):
        if entry.rank == expected:
            continue
        if expected > 0 and entry.rank == entries[expected - 1].rank:
            other = entries[expected - 1].place
            raise fault(path, f"rank {entry.rank} appears twice, in {other} and {entry.place}; expected once")
        raise fault(
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
            raise fault(path, f"{what}; expected consecutive ranks on each server")


def _check_devices(path: str, entries: Sequence[Entry]) -> None:
    seen: dict[tuple[str, int], Entry] = {}
    for entry in entries:
        other = seen.setdefault((entry.server, entry.device_id), entry)
        if other is not entry:
            what = f"device_id {entry.device_id} of server {entry.server!r} appears twice"
            raise fault(path, f"{what}, in {other.place} and {entry.place}; expected one rank per device")
    addressed = [entry for entry in entries if entry.device_ip is not None]
    for first, entry in zip(addressed, addressed[1:]):
        if (":" in str(first.device_ip)) != (":" in str(entry.device_ip)):
            what = f"{first.place}.device_ip is {first.device_ip!r} and {entry.place}.device_ip is {entry.device_ip!r}"
            raise fault(path, f"{what}; expected addresses of one family, IPv4 or IPv6")


_CORRECT = "correct the table (or have the tool that made it write it again); every rank reads the same one."


def fault(path: str, what: str, remedy: str = _CORRECT) -> ClusterError:
    return ClusterError(f"EI0004: rank table {path}: {what}.\nWhat to do: {remedy}")


def load_object(path: str) -> Fields:
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
    except OSError as error:
        remedy = "check the path in RANK_TABLE_FILE on this host, and whether this user can read it."
        raise fault(path, f"can't be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise fault(path, "can't be read: it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise fault(path, f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(content, dict):
        raise fault(path, f"holds {_shown(content)}; expected a JSON object")
    return Fields(path, "", content)


class Fields:
    """One JSON object of a table and its location in the file, so that each error can name the field."""

    def __init__(self, path: str, where: str, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self._where = where

    def place(self, name: str) -> str:
        """Return the location of a field of this object: ``server_list[0].device[1].rank_id``."""
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, expected: str) -> ClusterError:
        found = f"is {_shown(self.content[name])}" if name in self.content else "is missing"
        return fault(self.path, f"{self.place(name)} {found}; expected {expected}")

    def text(self, name: str, expected: str, limit: int | None = None) -> str:
        """Return a text that isn't empty. Numbers become text: many tables have numbers."""
        value = self.content.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip() or (limit is not None and len(value) > limit):
            raise self.wrong(name, expected)
        return value.strip()

    def number(self, name: str, expected: str = "a whole number from 0", low: int = 0, high: float = math.inf) -> int:
        text = self.text(name, expected)
        if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
            raise self.wrong(name, expected)
        return int(text)

    def has(self, name: str) -> bool:
        return self.content.get(name) not in (None, "")

    def optional_text(self, name: str) -> str | None:
        return self.text(name, "text") if self.has(name) else None

    def optional_address(self, name: str) -> str | None:
        text = self.optional_text(name)
        try:
            return None if text is None else str(ipaddress.ip_address(text))
        except ValueError:
            raise self.wrong(name, "an IPv4 or IPv6 address") from None

    def counts(self, name: str, number: int, things: str) -> None:
        """Check an optional field that says how many things the table lists."""
        if name in self.content and self.number(name, f"the number of {things}") != number:
            raise self.wrong(name, f"{number}, the number of {things}")

    def objects(self, name: str) -> list[Fields]:
        value = self.content.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list that is not empty")
        found = []
        for index, item in enumerate(value):
            place = f"{self.place(name)}[{index}]"
            if not isinstance(item, dict):
                raise fault(self.path, f"{place} is {_shown(item)}; expected an object")
            found.append(Fields(self.path, place, item))
        return found


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
