"""Which ranks share memory: those of one host that have proved it when the job began.

What the cluster calls a host only says who may try. The lowest rank of each host writes a random text into memory, the
others must find it there, and every rank learns the outcome, so that all choose the same backend for each group.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npu_device import environment
from npu_device.cluster.errors import ClusterError
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.shared_memory import mapping

_log = logging.getLogger("npu_device")
SECONDS = 60.0
"""How long a rank waits for a message that another one has sent or is about to send."""

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Hosts:
    """The outcome, the same on every rank.

    Attributes:
        leaders: for each rank the lowest rank with which it shares memory; the rank itself when there is none.
        processes: for each rank the number and the start of its process on its host.
    """

    leaders: tuple[int, ...]
    processes: tuple[tuple[int, str], ...]


_hosts: weakref.WeakKeyDictionary[Runtime, Hosts] = weakref.WeakKeyDictionary()


def hosts_of(runtime: Runtime) -> Hosts:
    """What ``prove`` has found."""
    return _hosts[runtime]


def prove(runtime: Runtime) -> None:
    """Find out who shares memory with whom. Called once on every rank, when the cluster is up.

    Raises:
        ClusterError: ``NPU_DEVICE_BACKEND`` differs among the ranks, or is ``shared_memory`` while ranks of one host
            can't share memory.
        ValueError: ``NPU_DEVICE_BACKEND`` is unknown.
    """
    cluster, store = runtime.cluster, runtime.store
    everybody = range(cluster.world_size)
    leads = cluster.local_rank == 0
    card, memory = _card(environment.NPU_DEVICE_BACKEND.get(), leads)
    store.set(f"memory/{cluster.rank}", json.dumps(card))
    cards = [json.loads(store.get(f"memory/{rank}", SECONDS)) for rank in everybody]
    wanted = _one_backend([card["backend"] for card in cards], cluster.hosts)
    problem = cards[cluster.rank]["problem"] or _search(card, cards[cluster.hosts.index(cluster.host)])
    store.set(f"memory_found/{cluster.rank}", problem)
    problems = [store.get(f"memory_found/{rank}", SECONDS) for rank in everybody]
    if memory is not None:
        memory.close()
    if wanted == "tensorflow":
        leaders = tuple(everybody)
    else:
        _report(wanted, problems, cluster.hosts, cluster.rank)
        leaders = tuple(rank if problems[rank] else cluster.hosts.index(cluster.hosts[rank]) for rank in everybody)
    _hosts[runtime] = Hosts(leaders, tuple((card["pid"], card["start"]) for card in cards))


def _card(backend: str, leads: bool) -> tuple[dict[str, Any], Any]:
    """What this rank tells the others about itself, and the memory in which they find its token."""
    pid = os.getpid()
    card: dict[str, Any] = {
        "backend": backend,
        "pid": pid,
        "start": mapping.process(pid),
        "who": "",
        "problem": "",
        "path": "",
    }
    if not mapping.is_supported():
        return {**card, "problem": "needs Linux on x86-64 with memfd_create"}, None
    try:
        card["who"] = mapping.identity()
        if not leads:
            return card, None
        memory, card["path"] = mapping.create(mapping.PAGE)
    except OSError as error:
        return {**card, "problem": f"no shared memory: {error}"}, None
    token = secrets.token_hex(_TOKEN_BYTES)
    memory[: 2 * _TOKEN_BYTES] = token.encode()
    return {**card, "token": token}, memory


def _search(mine: dict[str, Any], leader: dict[str, Any]) -> str:
    """Look for the leader's token in its memory; what is wrong, or nothing."""
    if leader["problem"]:
        return str(leader["problem"])
    if mine["who"] != leader["who"]:
        return "another kernel, PID namespace (container) or user than the host's lowest rank"
    try:
        with mapping.attach(leader["path"], mapping.PAGE) as memory:
            if memory[: 2 * _TOKEN_BYTES] != leader["token"].encode():
                return "the host's lowest rank has other memory under the same path"
    except (OSError, ValueError) as error:
        return f"can't open the memory of the host's lowest rank: {error}"
    return ""


def _one_backend(wanted: Sequence[str], hosts: Sequence[str]) -> str:
    if len(set(wanted)) == 1:
        return wanted[0]
    lines = [f"  rank {rank} on host {hosts[rank]}: {backend}" for rank, backend in enumerate(wanted)]
    raise ClusterError(
        "the ranks want different backends:\n" + "\n".join(lines) + "\n"
        "Likely cause: NPU_DEVICE_BACKEND is set on some ranks only.\n"
        "What to do: give every rank the same value, or none."
    )


def _report(wanted: str, problems: Sequence[str], hosts: Sequence[str], rank: int) -> None:
    """Say who can't share memory, where there is somebody to share it with."""
    lonely = [other for other, problem in enumerate(problems) if problem and hosts.count(hosts[other]) > 1]
    if not lonely:
        return
    lines = "\n".join(f"  rank {other} on host {hosts[other]}: {problems[other]}" for other in lonely)
    if wanted == "shared_memory":
        raise ClusterError(
            f"NPU_DEVICE_BACKEND is shared_memory, but ranks of one host can't share memory:\n{lines}\n"
            "What to do: start all ranks of a host as one user in one container, or leave NPU_DEVICE_BACKEND out: "
            "TensorFlow's collectives serve these ranks then."
        )
    if rank == 0:
        _log.warning(
            "ranks of one host can't share memory and use TensorFlow's collectives, which is slower:\n%s", lines
        )
