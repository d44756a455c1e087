"""Every environment variable that the package reads, and the only place that reads them.

A variable is a constant with its default, unit, expected form and meaning. ``python -m npu_device.environment`` prints
``docs/environment.md`` from them. What the values mean together (which scheme describes the job) is
``npu_device.cluster.membership``'s part. Variables that the launcher hands on to its ranks are ``npu_device.launch``'s.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, Generic, TypeVar

Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True)
class Form(Generic[Value_co]):
    """How a value is written: ``parse`` makes the value or raises ValueError; ``expected`` is for readers."""

    parse: Callable[[str], Value_co]
    expected: str


@dataclass(frozen=True)
class Variable(Generic[Value_co]):
    """One environment variable.

    Attributes:
        name: its name.
        form: how its value is written.
        default: what ``get`` returns when the variable is unset or empty.
        unit: unit of the value, or "".
        meaning: one sentence for the documentation.
        origin: whose variable it is: "Ascend", "TensorFlow" or "npu_device".
    """

    name: str
    form: Form[Value_co]
    default: Value_co
    unit: str
    meaning: str
    origin: str

    def raw(self) -> str | None:
        """The text as it stands in the environment; None when unset or empty."""
        return os.environ.get(self.name) or None

    def is_set(self) -> bool:
        """True when the variable is there and not empty."""
        return self.raw() is not None

    def get(self) -> Value_co:
        """The value, or the default when the variable is unset or empty.

        Raises:
            ValueError: the text doesn't have the expected form (Ascend's EI0001).
        """
        text = self.raw()
        if text is None:
            return self.default
        try:
            return self.form.parse(text.strip())
        except ValueError:
            raise ValueError(
                f"EI0001: the environment variable {self.name} is {text!r}; expected {self.form.expected}.\n"
                f"What to do: correct or unset {self.name}. It means: {self.meaning}"
            ) from None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """While the block runs nobody in this process finds the variable, TensorFlow neither."""
        text = os.environ.pop(self.name, None)
        try:
            yield
        finally:
            if text is not None:
                os.environ[self.name] = text


def _integer(low: int, high: int | None = None) -> Form[int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(text)
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return Form(parse, f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}")


def _one_of(*texts: str) -> Form[str]:
    def parse(text: str) -> str:
        if text not in texts:
            raise ValueError(text)
        return text

    return Form(parse, f"one of {', '.join(texts)}")


def _split(text: str) -> str | tuple[int, ...]:
    """``auto``, or numbers as ``set_split_strategy_by_idx`` takes them, with or without brackets."""
    if text == "auto":
        return text
    numbers = tuple(int(part) for part in text.strip("[]").split(","))
    if not 1 <= len(numbers) <= 8 or numbers[0] < 0 or list(numbers) != sorted(set(numbers)):
        raise ValueError(text)
    return numbers


def _windows(text: str) -> tuple[tuple[int, int], ...]:
    """``1-25,100-120``: first and last of each window."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(text)
        found.append((int(first), int(last)))
    return tuple(found)


def _seconds(high: float) -> Form[float]:
    def parse(text: str) -> float:
        value = float(text)
        if not 0 < value <= high:  # also refuses nan
            raise ValueError(text)
        return value

    return Form(parse, f"a number above 0, at most {high:g}")


_ADDRESS = Form(lambda text: str(ipaddress.ip_address(text)), "an IPv4 or IPv6 address")
_PATH = Form(str, "a path")
_TEXT = Form(str, "text")
_THREADS = "TensorFlow's own; when set, the cores of a host aren't divided among its ranks."

RANK_TABLE_FILE: Variable[str | None] = Variable(
    "RANK_TABLE_FILE", _PATH, None, "", "rank table (JSON) that names the servers and ranks of the job.", "Ascend"
)
RANK_ID: Variable[int | None] = Variable(
    "RANK_ID",
    _integer(0),
    None,
    "",
    "this process's rank in the rank table (in a table of pods also the pod's name).",
    "Ascend",
)
RANK_SIZE: Variable[int | None] = Variable(
    "RANK_SIZE", _integer(1), None, "ranks", "number of ranks in the job; 1 means a single device.", "Ascend"
)
POD_NAME: Variable[str | None] = Variable(
    "POD_NAME",
    _TEXT,
    None,
    "",
    "this process's pod in a rank table of pods (`group_list`); goes before RANK_ID there.",
    "Ascend",
)
CM_CHIEF_IP: Variable[str | None] = Variable(
    "CM_CHIEF_IP", _ADDRESS, None, "", "address of the chief's host, without a rank table.", "Ascend"
)
CM_CHIEF_PORT: Variable[int | None] = Variable(
    "CM_CHIEF_PORT", _integer(1, 65520), None, "", "port on which the chief listens.", "Ascend"
)
CM_CHIEF_DEVICE: Variable[int | None] = Variable(
    "CM_CHIEF_DEVICE", _integer(0), None, "", "device of the process on the chief's host that is the chief.", "Ascend"
)
CM_WORKER_SIZE: Variable[int | None] = Variable(
    "CM_WORKER_SIZE", _integer(1, 32768), None, "ranks", "number of ranks in the job, without a rank table.", "Ascend"
)
CM_WORKER_IP: Variable[str | None] = Variable(
    "CM_WORKER_IP",
    _ADDRESS,
    None,
    "",
    "address of this process's host, the same for all processes on it; default the address that the chief sees.",
    "Ascend",
)
ASCEND_DEVICE_ID: Variable[int | None] = Variable(
    "ASCEND_DEVICE_ID",
    _integer(0),
    None,
    "",
    "number of this process's device on its host; default DEVICE_ID.",
    "Ascend",
)
DEVICE_ID: Variable[int | None] = Variable(
    "DEVICE_ID",
    _integer(0),
    None,
    "",
    "older name of ASCEND_DEVICE_ID; default the local rank, or 0 when that isn't known.",
    "Ascend",
)
JOB_ID: Variable[str] = Variable(
    "JOB_ID",
    _TEXT,
    "default",
    "",
    "name of the job: letters, digits, `-` and `_`. Ranks of different jobs refuse each other.",
    "Ascend",
)
HCCL_CONNECT_TIMEOUT: Variable[float] = Variable(
    "HCCL_CONNECT_TIMEOUT", _seconds(7200), 120.0, "s", "how long the ranks wait for each other at the start.", "Ascend"
)
HCCL_IF_IP: Variable[str | None] = Variable(
    "HCCL_IF_IP",
    _ADDRESS,
    None,
    "",
    "address at which the other ranks reach this one; default the one that the chief sees.",
    "Ascend",
)
HCCL_IF_BASE_PORT: Variable[int | None] = Variable(
    "HCCL_IF_BASE_PORT",
    _integer(1024, 65520),
    None,
    "",
    "port on which the ranks of a rank table meet at rank 0, unless its entry has a `host_port`; default one of "
    "61000 to 64999, computed from the table and JOB_ID.",
    "Ascend",
)
AOE_MODE: Variable[str | None] = Variable(
    "AOE_MODE",
    _one_of("1", "2", "4"),
    None,
    "",
    "4 looks for the best gradient split (`npurun` does as with `--tune`); 1 and 2 tune NPU kernels, without effect. "
    "The option `aoe_config.aoe_mode` goes first.",
    "Ascend",
)
TUNE_BANK_PATH: Variable[str | None] = Variable(
    "TUNE_BANK_PATH",
    _PATH,
    None,
    "",
    "directory for the tuner's `<device>_gradient_fusion.json`; default the tuner's work path.",
    "Ascend",
)
PROFILING_MODE: Variable[str] = Variable(
    "PROFILING_MODE",
    _one_of("true", "false", "dynamic"),
    "false",
    "",
    "true traces the iterations, as the option `profiling_config.enable_profiling` does; dynamic is false here.",
    "Ascend",
)
PROFILING_OPTIONS: Variable[str | None] = Variable(
    "PROFILING_OPTIONS",
    Form(str, "JSON"),
    None,
    "",
    "what `PROFILING_MODE` traces, as the option `profiling_config.profiling_options` says it.",
    "Ascend",
)
NPU_LOOP_SIZE: Variable[int] = Variable(
    "NPU_LOOP_SIZE",
    _integer(1),
    1,
    "steps",
    "steps of a loop in one call; overridden by `npu.set_npu_loop_size`.",
    "Ascend",
)
TF_CONFIG: Variable[str | None] = Variable(
    "TF_CONFIG",
    Form(str, "JSON"),
    None,
    "",
    "cluster and task of this process, as Kubeflow's training operator sets it.",
    "TensorFlow",
)
TF_NUM_INTRAOP_THREADS: Variable[str | None] = Variable(
    "TF_NUM_INTRAOP_THREADS",
    _TEXT,
    None,
    "threads",
    _THREADS,
    "TensorFlow",
)
TF_NUM_INTEROP_THREADS: Variable[str | None] = Variable(
    "TF_NUM_INTEROP_THREADS",
    _TEXT,
    None,
    "threads",
    _THREADS,
    "TensorFlow",
)
NPU_DEVICE_HEARTBEAT_TIMEOUT: Variable[float] = Variable(
    "NPU_DEVICE_HEARTBEAT_TIMEOUT",
    _seconds(7200),
    10.0,
    "s",
    "a rank that sends no heartbeat for so long counts as lost, and the others raise.",
    "npu_device",
)
NPU_DEVICE_BACKEND: Variable[str] = Variable(
    "NPU_DEVICE_BACKEND",
    _one_of("auto", "tensorflow", "shared_memory"),
    "auto",
    "",
    "how data travels: `tensorflow` through TensorFlow's collective operations, `shared_memory` through memory that "
    "the ranks of a host share, and between hosts through TensorFlow; `auto` is `shared_memory` where possible. The "
    "same on all ranks.",
    "npu_device",
)
NPU_DEVICE_STALL_WARNING: Variable[float] = Variable(
    "NPU_DEVICE_STALL_WARNING",
    _seconds(86400),
    30.0,
    "s",
    "a rank that has waited so long for the others to make the same call says who is missing.",
    "npu_device",
)
NPU_DEVICE_STALL_TIMEOUT: Variable[float] = Variable(
    "NPU_DEVICE_STALL_TIMEOUT",
    _seconds(86400),
    600.0,
    "s",
    "a rank that has waited so long for the others to make the same call gives up with an error.",
    "npu_device",
)
NPU_DEVICE_ERROR_FILE: Variable[str | None] = Variable(
    "NPU_DEVICE_ERROR_FILE",
    _PATH,
    None,
    "",
    "where a failing rank leaves its error for `npurun`, which sets this.",
    "npu_device",
)
NPU_DEVICE_TRACE_ITERATIONS: Variable[tuple[tuple[int, int], ...]] = Variable(
    "NPU_DEVICE_TRACE_ITERATIONS",
    Form(_windows, "first and last iteration, such as 1-25 or 100-120,500-520"),
    (),
    "iterations",
    "which iterations a trace records; default the first 100, and then fewer and fewer: every 2nd up to 200, every 4th "
    "up to 400, and so on.",
    "npu_device",
)
NPU_DEVICE_SPLIT: Variable[str | tuple[int, ...] | None] = Variable(
    "NPU_DEVICE_SPLIT",
    Form(_split, "auto, or 1 to 8 ascending numbers with commas between them"),
    None,
    "",
    "how gradients are cut where the script sets no split strategy: `auto` takes what `npurun --tune` found for this "
    "model and cluster; numbers are those of `set_split_strategy_by_idx`, for lists that they fit.",
    "npu_device",
)
NPU_DEVICE_SPLIT_DIR: Variable[str | None] = Variable(
    "NPU_DEVICE_SPLIT_DIR",
    _PATH,
    None,
    "",
    "where found splits are kept; default `~/.cache/npu_device/splits`. Rank 0's host counts.",
    "npu_device",
)

ALL: tuple[Variable, ...] = tuple(value for value in globals().values() if isinstance(value, Variable))
"""Every variable, in the order of the page."""


def user_sets_threads() -> bool:
    """True when the environment fixes the size of TensorFlow's thread pools."""
    return TF_NUM_INTRAOP_THREADS.is_set() or TF_NUM_INTEROP_THREADS.is_set()


_PAGE_HEAD = """\
# Environment variables

Generated by `python -m npu_device.environment`. An empty variable counts as unset. A value of another form raises a
`ValueError` with Ascend's code EI0001. [launching.md](launching.md) says how the variables describe a job together.
"""


def page() -> str:
    """``docs/environment.md``: one table for each origin."""
    parts = [_PAGE_HEAD]
    for origin in dict.fromkeys(variable.origin for variable in ALL):
        parts.append(f"\n## {origin}\n\n| variable | default | unit | expected | meaning |\n|---|---|---|---|---|\n")
        for variable in ALL:
            if variable.origin == origin:
                default = "–" if variable.default in (None, ()) else f"`{_plain(variable.default)}`"
                unit, expected = variable.unit or "–", variable.form.expected
                cells = (f"`{variable.name}`", default, unit, expected, variable.meaning)
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
