"""A TCP proxy that disturbs what passes through it: where network namespaces need a root that you don't have.

Ranks that should feel the faults get the proxy as the address of the chief (``CM_CHIEF_IP``, ``CM_CHIEF_PORT``).
Their control channel then goes through it. Tensors don't: between hosts, TensorFlow's servers connect directly.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from npu_device._src.threads import start_thread

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: closing sends RST


class Proxy:
    """Forwards connections to another address; what arrives from now on is delayed by ``delay`` seconds."""

    def __init__(
        self, host: str, port: int, listen_address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self._target = host, port
        self._listener = socket.create_server(listen_address)
        self.port: int = self._listener.getsockname()[1]
        self.delay = 0.0
        self._open = threading.Event()
        self._open.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        start_thread("soak-proxy", self._accept)

    def drop(self) -> None:
        """Forward nothing from now on, and keep the connections open, as a cut network does."""
        self._open.clear()

    def resume(self) -> None:
        """Forward again, including what was held back."""
        self._open.set()

    def reset(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    # The shutdown wakes the thread that reads.
                    end.shutdown(socket.SHUT_RD)
        for pair in self._pairs:
            for end in pair:
                end.close()
        self._pairs.clear()

    def half_close(self) -> None:
        """Tell the target that nothing more will come on any connection, but go on forwarding what it sends."""
        for _, target in self._pairs:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        # Opened, since threads that are held back have to see the end.
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                # Most ranks try to connect before the hub listens.
                target = socket.create_connection(self._target, 10)
            except OSError:
                # Nobody listens there yet, and the client tries again.
                client.close()
                continue
            target.settimeout(None)
            self._pairs.append((client, target))
            for source, sink in ((client, target), (target, client)):
                start_thread("soak-proxy", self._forward, source, sink)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(_CHUNK):
                if self.delay:
                    time.sleep(self.delay)
                # A block that was received already is held, too, and not lost.
                self._open.wait()
                sink.sendall(block)
            sink.shutdown(socket.SHUT_WR)
