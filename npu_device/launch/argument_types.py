"""How the options of npurun and its commands are declared, and what their values may be."""

from __future__ import annotations

import argparse
import re
import signal
import textwrap
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

from npu_device._src import environment
from npu_device._src.collectives.gpu_choice import visible_names
from npu_device._src.environment import forms
from npu_device._src.environment.forms import Form

AUTO = "auto"  # the default of --nproc-per-node
HostSlots = list[tuple[str, Optional[int]]]
"""Hosts, each with its number of ranks if that is given."""
_Value = TypeVar("_Value")


def add_options(target: argparse._ActionsContainer, table: str, **forms: Any) -> None:
    """Add options as their help shows them, ``-n --nproc-per-node N`` and a text after two spaces.

    One without a value is True or False, one without a text isn't shown, and neither is the spelling with underscores,
    which torchrun accepts too. ``forms`` are what parses the values, or a tuple of all values, by the long names.
    """
    for row in re.split(r"\n(?=-)", textwrap.dedent(table).strip()):
        spelled, _, text = row.partition("  ")
        names = spelled.split()
        settings: dict[str, Any] = {"help": " ".join(text.split()) or argparse.SUPPRESS}
        if names[-1].startswith("-"):
            settings["action"] = "store_true"
        else:
            settings["metavar"] = names.pop()
        long_name = names[-1].lstrip("-").replace("-", "_")
        form = forms.get(long_name)
        if isinstance(form, tuple):
            settings["choices"] = form
        elif form is not None:
            settings["type"] = form
        target.add_argument(*names, **settings)
        if "_" in long_name:
            settings["help"] = argparse.SUPPRESS
            target.add_argument("--" + long_name, **settings)


class WrongValueError(argparse.ArgumentTypeError, ValueError):
    """The value of an option is wrong. argparse shows the text of this error, and hides that of a ValueError."""


def _of(form: Form[_Value]) -> Callable[[str], _Value]:
    def parse(text: str) -> _Value:
        try:
            return form.parse(text)
        except ValueError:
            raise WrongValueError(f"{text!r} is not {form.expected}") from None

    return parse


def _nodes(text: str) -> tuple[int, int]:
    return int(text.partition(":")[0]), forms.most_nodes(text)


def _seconds(text: str) -> float:
    number = float(text)
    # The comparison also refuses NaN.
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def _job_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise ValueError(text)
    return text


def _ranks(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    return forms.COUNT.parse(text)


count = _of(forms.INDEX)
positive = _of(forms.COUNT)
port = _of(forms.PORT)
ranks = _of(Form(_ranks, f"{forms.COUNT.expected}, or {AUTO}"))
nodes = _of(Form(_nodes, "a number of nodes, or MIN:MAX"))
seconds = _of(Form(_seconds, "a number of seconds"))
minutes = _of(Form(forms.seconds(1e9).parse, "a number of minutes above 0"))
job_id = _of(Form(_job_id, "letters, digits, '-' and '_'"))
# Checked as the variable in which the ranks get the limit.
preempt_seconds = _of(environment.NPU_DEVICE_PREEMPT_TIMEOUT.form)
preempt_signal = _of(
    Form(
        lambda text: int(signal.Signals[environment.NPU_DEVICE_PREEMPT_SIGNAL.form.parse(text)]),
        environment.NPU_DEVICE_PREEMPT_SIGNAL.form.expected,
    )
)


def ranks_per_node() -> int:
    """Return the number of GPUs of this node; 1 without any."""
    return max(1, visible_gpus())


def visible_gpus() -> int:
    """Return the number of GPUs that CUDA shows to a process of this node.

    Asks neither TensorFlow nor the driver: CUDA_VISIBLE_DEVICES counts, or else the device files of NVIDIA.
    """
    names = visible_names(environment.CUDA_VISIBLE_DEVICES.text())
    if names is None:
        names = tuple(
            file.name
            for file in Path("/dev").glob("nvidia*")
            if re.fullmatch(r"nvidia\d+", file.name)
        )
    return len(names)


_HOST = re.compile(r"(?P<host>[^\s:\[\]]+|([^\s:\[\]]+@)?\[[^\s\]]+\])(:(?P<number>[1-9][0-9]*))?")


def parse_hosts(text: str) -> HostSlots:
    """Return each host of a list with its number of ranks; WrongValueError if one is malformed or listed twice.

    >>> parse_hosts("a:4,me@b:4,[fd00::1]")
    [('a', 4), ('me@b', 4), ('fd00::1', None)]
    """
    hosts: dict[str, int | None] = {}
    for word in text.split(","):
        match = _HOST.fullmatch(word.strip())
        if match is None:
            raise WrongValueError(f"{word!r} is not HOST, HOST:N or [ADDRESS]:N")
        # ssh takes an IPv6 address without the brackets.
        host = re.sub(r"[\[\]]", "", match["host"])
        if host in hosts:
            raise WrongValueError(f"{host} is listed twice; HOST:N starts N ranks there")
        hosts[host] = None
        if match["number"]:
            hosts[host] = int(match["number"])
    return list(hosts.items())


def read_hosts(path: str) -> HostSlots:
    """Return the hosts of a file, one a line, as ``parse_hosts`` takes it, or ``HOST slots=N``; # begins a comment."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    # Written as in mpirun's host files: ``name slots=N``.
    hosts = [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]
    if not hosts:
        raise ValueError(f"{path} lists no host")
    return parse_hosts(",".join(hosts))


def filled_hosts(hosts: HostSlots, total: int) -> HostSlots:
    """Return the hosts that so many ranks need, which fill one after the other; ValueError if they aren't alike.

    >>> filled_hosts([("a", 2), ("b", 2), ("c", 2)], 4)
    [('a', 2), ('b', 2)]
    """
    numbers = []
    remaining = total  # the number of ranks that earlier hosts have left
    for _, slots in hosts:
        numbers.append(min(slots or max(1, total // len(hosts)), remaining))
        remaining -= numbers[-1]
    names = [host for host, _ in hosts]
    # Hosts may be left empty, but those in use need the same number of ranks.
    if remaining or len(set(numbers) - {0}) > 1:
        host_count = min(len(hosts), total)
        per_host = total // host_count
        counts = ", ".join(f"{number} on {host}" for host, number in zip(names, numbers))
        alike = ",".join(f"{host}:{per_host}" for host in names[:host_count])
        raise ValueError(
            f"-np {total} gives {counts}; npurun starts all {total} ranks, the same number on each host. For example: "
            f"npurun -np {per_host * host_count} -H {alike}"
        )
    return [(host, number) for host, number in zip(names, numbers) if number]
