"""TCP connections of other processes to other hosts: resets and half-closes them, as a network or a firewall may.

Needs Linux 5.6, and the right to trace the processes (your own, where the system allows that; or root).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

_PIDFD_GETFD = 438  # the same number on all architectures but Alpha
_ESTABLISHED = "01"
_UNSPECIFIED = ctypes.create_string_buffer(16)  # an address of the family AF_UNSPEC
_LOOPBACK = re.compile(r"(0{16}FFFF0{4})?.{6}7F|0{24}01000000")


def reset(pids: Iterable[int]) -> int:
    """Reset the connections of processes to other hosts, on both sides; return how many."""
    return sum(_disconnect(connection) for connection in _to_other_hosts(pids))


def half_close(pids: Iterable[int]) -> int:
    """Announce to other hosts, on each connection of processes, that nothing more will come; return how many."""
    count = 0
    for connection in _to_other_hosts(pids):
        # The connection may have ended meanwhile.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            count += 1
    return count


def _disconnect(connection: socket.socket) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    # Linux aborts a TCP connection, with RST, when it is connected to an address of this family.
    return libc.connect(connection.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)) == 0


def _to_other_hosts(pids: Iterable[int]) -> Iterator[socket.socket]:
    """Yield copies of the processes' connected sockets whose other end isn't on this host."""
    inodes = set()
    for pid in pids:
        # The process may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            remote = _remote_inodes(pid)
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                # The connection may end, too.
                with contextlib.suppress(FileNotFoundError):
                    # A child that was forked has the same connection as its parent.
                    inode = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if inode in remote and inode not in inodes:
                        inodes.add(inode)
                        with _copy(pid, int(descriptor)) as connection:
                            yield connection


def _remote_inodes(pid: int) -> set[str]:
    """Return the names in ``/proc/PID/fd`` of TCP connections to other hosts, in the network namespace of PID."""
    names = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            # The addresses are hexadecimal, with the port behind a colon.
            columns = line.split()
            local_address = columns[1].partition(":")[0]
            remote_address = columns[2].partition(":")[0]
            # A connection of this host to itself has the same address at both ends.
            is_remote = remote_address != local_address and not _LOOPBACK.fullmatch(remote_address)
            if is_remote and columns[3] == _ESTABLISHED:
                names.add(f"socket:[{columns[9]}]")
    return names


def _copy(pid: int, descriptor: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            error_number = ctypes.get_errno()
            # The descriptor was closed since it was listed.
            if error_number == errno.EBADF:
                raise FileNotFoundError
            raise OSError(
                error_number,
                f"can't get at a connection of process {pid}: {os.strerror(error_number)}",
            )
    finally:
        os.close(process)
    return socket.socket(fileno=copy)
