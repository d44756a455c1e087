"""The rank table that the launcher writes for its ranks, in Ascend's version 1.0.

Reading tables is left to ``cluster``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence


def text(nodes: Sequence[int], nproc_per_node: int, master_addr: str, master_port: int) -> str:
    """Return the table as JSON. Equal arguments give equal bytes, so that each node of a job can write its own copy.

    Args:
        nodes: numbers of the nodes in the table; the first one is node 0.
        nproc_per_node: devices (= ranks) of each server.
        master_addr: address or name of the first server; the others' addresses need not be known.
        master_port: port where the hub listens for the ranks.

    Source: Ascend HCCL user guide, cluster information configuration (rank table, version 1.0).
    """
    servers = []
    for index, node in enumerate(nodes):
        ranks = range(index * nproc_per_node, (index + 1) * nproc_per_node)
        devices = [{"device_id": str(local), "rank_id": str(rank)} for local, rank in enumerate(ranks)]
        meeting = {}
        if index == 0:
            meeting["host_ip"] = master_addr
            devices[0]["host_port"] = str(master_port)
        servers.append({"server_id": f"node{node}", **meeting, "device": devices})
    table = {"version": "1.0", "status": "completed", "server_count": str(len(nodes)), "server_list": servers}
    return json.dumps(table, indent=2) + "\n"
