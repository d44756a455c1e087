"""The hosts of ``npurun --hosts`` and ``--hostfile``."""

from __future__ import annotations

import re
from pathlib import Path

_HOST = re.compile(r"(?P<host>[^\s:\[\]]+|([^\s:\[\]]+@)?\[[^\s\]]+\])(:(?P<number>[1-9][0-9]*))?")


def parse(text: str) -> list[tuple[str, int | None]]:
    """Return each host of a list with its number of ranks; ValueError if one is malformed or listed twice.

    >>> parse("a:4,me@b:4,[fd00::1]")
    [('a', 4), ('me@b', 4), ('fd00::1', None)]
    """
    found: list[tuple[str, int | None]] = []
    for word in text.split(","):
        match = _HOST.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"{word!r} is not HOST, HOST:N or [ADDRESS]:N")
        host = re.sub(r"[\[\]]", "", match["host"])
        if host in dict(found):
            raise ValueError(f"{host} is listed twice; HOST:N starts N ranks there")
        found.append((host, int(match["number"]) if match["number"] else None))
    return found


def read(path: str) -> list[tuple[str, int | None]]:
    """Return the hosts of a file, one a line, as ``parse`` takes it or as ``HOST slots=N``; # begins a comment."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    hosts = [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]
    if not hosts:
        raise ValueError(f"{path} lists no host")
    return parse(",".join(hosts))


def filled(hosts: list[tuple[str, int | None]], total: int) -> list[tuple[str, int | None]]:
    """Return the hosts that so many ranks need, which fill one after the other; ValueError if they aren't alike.

    >>> filled([("a", 2), ("b", 2), ("c", 2)], 4)
    [('a', 2), ('b', 2)]
    """
    room = [number or max(1, total // len(hosts)) for _, number in hosts]
    used = [max(0, min(number, total - sum(room[:place]))) for place, number in enumerate(room)]
    if sum(used) < total or len(set(used) - {0}) > 1:
        count = min(len(hosts), total)
        each = total // count
        counts = ", ".join(f"{number} on {host}" for (host, _), number in zip(hosts, used))
        alike = ",".join(f"{host}:{each}" for host, _ in hosts[:count])
        raise ValueError(
            f"-np {total} gives {counts}; npurun starts all {total} ranks, the same number on each host. For example: "
            f"npurun -np {each * count} -H {alike}"
        )
    return [(host, number) for (host, _), number in zip(hosts, used) if number]


def name(host: str) -> str:
    return host.rpartition("@")[2]
