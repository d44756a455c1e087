"""``stupid_repeat``, the self-test that Ascend's adapter exports."""

from __future__ import annotations

import logging

_log = logging.getLogger("npu_device")


def stupid_repeat(word: str, times: int) -> None:
    """Log a word a number of times, at level INFO.

    Source: Ascend TF Adapter 2.x, ``npu_device.npu_device.stupid_repeat``.
    """
    for _ in range(times):
        _log.info("%s", word)
