"""What the values of npurun's options may be. Each function parses one kind, or raises ``ArgumentTypeError``."""

from __future__ import annotations

import argparse
import re
import signal

from npu_device._src import environment
from npu_device.launch import platform_defaults

_JOB_ID = re.compile(r"[A-Za-z0-9_-]+")


def ranks(text: str) -> int | str:
    return text if text == platform_defaults.AUTO else count(text, 1)


def positive(text: str) -> int:
    return count(text, 1)


def count(text: str, low: int = 0) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a {'positive' if low else 'non-negative'} integer; found {text!r}")
    return int(text)


def nodes(text: str) -> tuple[int, int]:
    """Parse ``2``, or ``2:4`` for the fewest and the most nodes."""
    fewest, colon, most = text.partition(":")
    found = count(fewest, 1), count(most if colon else fewest, 1)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX")
    return found


def signal_number(text: str) -> int:
    form = environment.NPU_DEVICE_PREEMPT_SIGNAL.form
    try:
        return int(signal.Signals[form.parse(text)])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {form.expected}") from None


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def preempt_seconds(text: str) -> float:
    form = environment.NPU_DEVICE_PREEMPT_TIMEOUT.form  # the ranks get the limit in this variable
    try:
        return form.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {form.expected}") from None


def job_id(text: str) -> str:
    if not _JOB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: a job id has letters, digits, '-' and '_' only")
    return text
