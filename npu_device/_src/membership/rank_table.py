"""Ascend's rank tables, in all four forms: versions 1.0 and 1.2 (``server_list``), older cloud and lab
(``group_list``).

Source: Ascend HCCL user guide, cluster information configuration (rank table).
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import TABLE_POLL_SECONDS
from npu_device._src.environment.forms import ADDRESS, INDEX, PORT, TEXT, Form, Value


@dataclass(frozen=True)
class TableDevice:
    """One device of the table, which is one rank."""

    rank: int
    server_id: str
    device_id: int
    host_ip: str | None  # address or name of the server, if given
    device_ip: str | None  # address of the device, if given
    host_port: int | None  # port of the server for this rank, if given
    pod: str | None  # name of its pod, in tables of pods
    location: str  # place in the file, for messages


@dataclass(frozen=True)
class RankTable:
    """A valid table."""

    path: str
    devices: tuple[TableDevice, ...]  # devices by rank
    # True for the forms with ``group_list``, in which a process may be named by its pod.
    has_pods: bool
    checksum: int  # the same for equal tables, whatever their formatting

    @property
    def size(self) -> int:
        return len(self.devices)


def load(path: str, timeout: float) -> RankTable:
    """Read a table and check it; ClusterError (EI0004) if it can't be read, breaks a rule, or isn't completed."""
    deadline = time.monotonic() + timeout
    is_filling = False
    while True:
        try:
            table = load_object(path)
            if table.text("status", '"completed" or "initializing"') != "initializing":
                return _read(table)
            is_filling = True
        except ClusterError:
            # The scheduler may be in the middle of writing; only a table seen as "initializing" is read again.
            if not is_filling or time.monotonic() >= deadline:
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
    has_pods = False
    if "server_list" in table.content:
        devices = _read_servers(table)
    elif "group_list" in table.content:
        devices = _read_groups(table)
        has_pods = True
    else:
        raise table.wrong("server_list", "a list of servers (or group_list, in the older forms)")
    devices.sort(key=lambda device: device.rank)
    _check_ranks(table.path, devices)
    _check_devices(table.path, devices)
    # Tools of different hosts may format the same table differently.
    normalised = json.dumps(table.content, sort_keys=True, separators=(",", ":"))
    # All ranks must have the same table, and compare the checksum.
    checksum = zlib.crc32(normalised.encode())
    return RankTable(table.path, tuple(devices), has_pods, checksum)


def _read_servers(table: Fields) -> list[TableDevice]:
    """Read a table of version 1.0 or 1.2."""
    version = table.text("version", '"1.0" or "1.2"')
    if version not in ("1.0", "1.2"):
        raise table.wrong("version", '"1.0" or "1.2"')
    servers = table.objects("server_list")
    table.check_count("server_count", len(servers), "entries of server_list")
    devices = []
    server_ids: list[str] = []
    for server in servers:
        server_id = server.server_id()
        # Servers are told apart by this id: with one id twice, ranks of two servers would be taken for neighbours.
        if server_id in server_ids:
            twin = server_ids.index(server_id)
            raise server.wrong("server_id", f"another one: server_list[{twin}] has the same")
        server_ids.append(server_id)
        for fields in server.objects("device"):
            devices.append(_device(fields, server, fields.whole_number("rank_id"), None))
    return devices


def _read_groups(table: Fields) -> list[TableDevice]:
    """Read a table of the older cloud form or of the lab form."""
    groups = table.objects("group_list")
    table.check_count("group_count", len(groups), "entries of group_list")
    # All groups together make up the world, in file order.
    pairs: list[tuple[Fields, Fields]] = []
    for group in groups:
        instances = group.objects("instance_list")
        group.check_count("instance_count", len(instances), "entries of instance_list")
        count_before = len(pairs)
        # An instance is one process with its devices.
        for instance in instances:
            pairs += [(instance, fields) for fields in instance.objects("devices")]
        group.check_count("device_count", len(pairs) - count_before, "devices of the group")
    is_lab = any("rank_id" in instance.content for instance, _ in pairs)
    devices = []
    for position, (instance, fields) in enumerate(pairs):
        if is_lab:
            rank = instance.whole_number("rank_id")
            pod = instance.optional("pod_name", TEXT)
        else:
            rank = position
            pod = instance.text("pod_name", "the pod's name")
        devices.append(_device(fields, instance, rank, pod))
    return devices


def _device(fields: Fields, server: Fields, rank: int, pod: str | None) -> TableDevice:
    return TableDevice(
        rank=rank,
        server_id=server.server_id(),
        device_id=fields.whole_number("device_id"),
        host_ip=server.optional("host_ip", TEXT),
        device_ip=fields.optional("device_ip", ADDRESS),
        host_port=fields.optional("host_port", PORT, "a port from 1 to 65535"),
        pod=pod,
        location=fields.location("")[:-1],
    )


def _check_ranks(path: str, devices: Sequence[TableDevice]) -> None:
    """Check that the ranks, in order, have no gaps, and that those of a server follow each other."""
    for expected, device in enumerate(devices):
        if device.rank == expected:
            continue
        # A rank that comes twice follows itself, since devices are sorted by rank.
        if expected > 0 and device.rank == devices[expected - 1].rank:
            twin = devices[expected - 1].location
            raise fault(
                path,
                f"rank {device.rank} appears twice, in {twin} and {device.location}; expected once",
            )
        raise fault(
            path,
            f"rank {expected} is missing, while {device.location} is rank {device.rank}; "
            f"expected the {len(devices)} ranks 0 to {len(devices) - 1} without gaps",
        )
    finished_servers = set()
    for previous, device in zip(devices, devices[1:]):
        if device.server_id != previous.server_id:
            finished_servers.add(previous.server_id)
        if device.server_id in finished_servers:
            raise fault(
                path,
                f"{device.location} is rank {device.rank} on server {device.server_id!r}, after rank "
                f"{previous.rank} on another; expected consecutive ranks on each server",
            )


def _check_devices(path: str, devices: Sequence[TableDevice]) -> None:
    by_server_and_id: dict[tuple[str, int], TableDevice] = {}
    for device in devices:
        twin = by_server_and_id.setdefault((device.server_id, device.device_id), device)
        if twin is not device:
            raise fault(
                path,
                f"device_id {device.device_id} of server {device.server_id!r} appears twice, in {twin.location} and "
                f"{device.location}; expected one rank per device",
            )
    addressed = [device for device in devices if device.device_ip is not None]
    for previous, device in zip(addressed, addressed[1:]):
        is_ipv6 = ":" in str(device.device_ip)
        if is_ipv6 != (":" in str(previous.device_ip)):
            raise fault(
                path,
                f"{previous.location}.device_ip is {previous.device_ip!r} and {device.location}.device_ip is "
                f"{device.device_ip!r}; expected addresses of one family, IPv4 or IPv6",
            )


_CORRECT = "correct the table (or have the tool that made it write it again); every rank reads the same one."


def fault(path: str, problem: str, remedy: str = _CORRECT) -> ClusterError:
    return ClusterError(f"EI0004: rank table {path}: {problem}.\nWhat to do: {remedy}")


def load_object(path: str) -> Fields:
    try:
        # Tools on Windows begin a file with a mark of the encoding.
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
    except OSError as error:
        remedy = (
            "check the path in RANK_TABLE_FILE on this host, and whether this user can read it."
        )
        raise fault(path, f"can't be read: {error.strerror}", remedy) from error
    except UnicodeDecodeError as error:
        raise fault(path, "can't be read: it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise fault(
            path, f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    if not isinstance(content, dict):
        raise fault(path, f"holds {_excerpt(content)}; expected a JSON object")
    return Fields(path, "", content)


@dataclass
class Fields:
    """One JSON object of a table and its location in the file, so that each error can name the field."""

    path: str
    _location: str
    content: dict[str, Any]

    def location(self, name: str) -> str:
        """Return the location of a field of this object: ``server_list[0].device[1].rank_id``."""
        # The table itself has no location.
        if not self._location:
            return name
        return f"{self._location}.{name}"

    def wrong(self, name: str, expected: str) -> ClusterError:
        state = "is missing"
        if name in self.content:
            state = f"is {_excerpt(self.content[name])}"
        return fault(self.path, f"{self.location(name)} {state}; expected {expected}")

    def text(self, name: str, expected: str) -> str:
        """Return a text that isn't empty. Numbers become text: many tables have numbers."""
        text = self.content.get(name)
        # No bool, which would be an instance of int.
        if type(text) is int:
            text = str(text)
        if not isinstance(text, str) or not text.strip():
            raise self.wrong(name, expected)
        return text.strip()

    def server_id(self) -> str:
        expected = "text of 1 to 64 characters"
        server_id = self.text("server_id", expected)
        # The limit is Ascend's.
        if len(server_id) > 64:
            raise self.wrong("server_id", expected)
        return server_id

    def parsed(self, name: str, form: Form[Value], expected: str) -> Value:
        text = self.text(name, expected)
        try:
            return form.parse(text)
        except ValueError:
            raise self.wrong(name, expected) from None

    def whole_number(self, name: str, expected: str = "a whole number from 0") -> int:
        return self.parsed(name, INDEX, expected)

    def optional(self, name: str, form: Form[Value], expected: str = "") -> Value | None:
        if self.content.get(name) in (None, ""):
            return None
        return self.parsed(name, form, expected or form.expected)

    def check_count(self, name: str, count: int, noun: str) -> None:
        """Check an optional field that says how many of something the table lists."""
        meaning = f"the number of {noun}"
        if name in self.content and self.whole_number(name, meaning) != count:
            raise self.wrong(name, f"{count}, {meaning}")

    def objects(self, name: str) -> list[Fields]:
        contents = self.content.get(name)
        if not isinstance(contents, list) or not contents:
            raise self.wrong(name, "a list that is not empty")
        objects = []
        for index, content in enumerate(contents):
            location = f"{self.location(name)}[{index}]"
            if not isinstance(content, dict):
                raise fault(self.path, f"{location} is {_excerpt(content)}; expected an object")
            objects.append(Fields(self.path, location, content))
        return objects


def _excerpt(content: object) -> str:
    text = json.dumps(content, ensure_ascii=False)
    if len(text) > 60:
        text = f"{text[:57]}..."
    return text
