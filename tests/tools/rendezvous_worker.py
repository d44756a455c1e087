"""One rank that does nothing but meet the others, and prints what came of it as a line of JSON. Without TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time

from npu_device._src.cluster import rendezvous
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership.schemes import membership_from_environment


def open_sockets() -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def main(versions: str = "null") -> None:
    membership = membership_from_environment()
    assert membership is not None
    if found := json.loads(versions):
        rendezvous.installed_versions = lambda: found
    report: dict[str, object] = {"has_secret": bool(membership.secret)}
    sockets, began = open_sockets(), time.monotonic()
    try:
        cluster, channel = rendezvous.meet(membership)
        names = (*dataclasses.asdict(cluster), "host", "world_size", "local_rank", "local_size")
        report["cluster"] = {name: getattr(cluster, name) for name in names}
        channel.close()
    except ClusterError as error:
        report["error"] = str(error)
    report["seconds"] = time.monotonic() - began
    for thread in threading.enumerate():
        # The resolver of the system can't be stopped, and may answer late.
        if thread.name == "npu_device-resolve":
            thread.join(10.0)
    report |= {
        "sockets_left": open_sockets() - sockets,
        "threads_left": threading.active_count() - 1,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
