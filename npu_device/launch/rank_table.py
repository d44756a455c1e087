"""The rank table that the launcher writes for its ranks, in Ascend's form 1.0, and the port on which they meet.

Reading tables is ``npu_device.cluster``'s part.
"""

from __future__ import annotations

import json
import socket


def text(nnodes: int, nproc_per_node: int, master_addr: str, master_port: int) -> str:
    """The table as JSON. Equal arguments give equal bytes, so that each node of a job can write its own copy.

    Args:
        nnodes: number of servers in the table.
        nproc_per_node: devices (= ranks) of each server.
        master_addr: address or name of the first server; the others' addresses need not be known.
        master_port: port on which rank 0 listens for the others.

    Source: Ascend HCCL user guide, cluster information configuration (rank table, version 1.0).
    """
    servers = []
    for node in range(nnodes):
        ranks = range(node * nproc_per_node, (node + 1) * nproc_per_node)
        devices = [{"device_id": str(local), "rank_id": str(rank)} for local, rank in enumerate(ranks)]
        meeting = {}
        if node == 0:
            meeting["host_ip"] = master_addr
            devices[0]["host_port"] = str(master_port)
        servers.append({"server_id": f"node{node}", **meeting, "device": devices})
    table = {"version": "1.0", "status": "completed", "server_count": str(nnodes), "server_list": servers}
    return json.dumps(table, indent=2) + "\n"


def free_port(address: str) -> int:
    """A port of this host that the system chose, and that it won't choose again for about a minute.

    The port has seen one connection whose server side was closed first, so that it stays in TIME_WAIT: the system does
    not hand it out again by itself, but rank 0 can listen on it (with SO_REUSEADDR).

    Args:
        address: IP address or name of this host.

    Raises:
        OSError: the address is unknown, or not one of this host's.
    """
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(1)
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            listener.accept()[0].close()
        return int(listener.getsockname()[1])
