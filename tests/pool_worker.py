"""One rank of a pool (``pool.py``): opens the device, then calls what it is told to until the connection ends."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

import allowed_warnings
import leaks
from answers import Answer

import npu_device as npu


def _call(module: str, name: str, arguments: tuple[Any, ...]) -> Answer:
    body = getattr(importlib.import_module(module), name)
    before = leaks.held()
    with allowed_warnings.collected() as warnings:
        try:
            succeeded, value = True, body(*arguments)
        except Exception:
            succeeded, value = False, traceback.format_exc()
    return Answer(succeeded, value, warnings, leaks.held().beyond(before))


def main() -> None:
    with Client(sys.argv[1], family="AF_UNIX") as connection:
        connection.send(npu.open().as_default().worker_id)
        while True:
            try:
                module, name, arguments = connection.recv()
            except (EOFError, OSError):
                npu.close()
                os._exit(0)  # for Python to take all graphs apart would be seconds; jobs test how a rank ends
            connection.send(_call(module, name, arguments))


if __name__ == "__main__":
    main()
