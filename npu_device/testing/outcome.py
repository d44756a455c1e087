"""The outcome of a soak's faults, as text: one line each, and which kinds ended an attempt or were ridden out."""

from __future__ import annotations

from collections.abc import Sequence

from npu_device.testing.faults import Fault


def table(faults: Sequence[Fault]) -> str:
    """Return one line for each fault."""
    rows = ["soak:   after  fault       where     for  attempt  outcome"]
    for fault in faults:
        lasted = f"{fault.seconds:4.1f} s" if fault.seconds else "     –"
        row = f"{fault.after:6.1f} s  {fault.kind:10}  {fault.where:6}  {lasted}  {fault.attempt:7}  {_outcome(fault)}"
        rows.append(f"soak: {row}")
    return "\n".join(rows)


def by_kind(faults: Sequence[Fault]) -> str:
    """Return one line for each kind of fault."""
    rows = ["soak: fault       ended an attempt    ridden out"]
    for kind in dict.fromkeys(fault.kind for fault in faults):
        these = [fault for fault in faults if fault.kind == kind]
        ended, ridden = (_counted([fault for fault in these if fault.ended is wanted]) for wanted in (True, False))
        rows.append(f"soak: {kind:10}  {ended:18}  {ridden}")
    return "\n".join(rows)


def _outcome(fault: Fault) -> str:
    if not fault.ended:
        return "ridden out"
    if fault.recovered is None:
        return "the attempt ended, and no other came"
    return f"the attempt ended; all ranks run again after {fault.recovered:.1f} s"


def _counted(faults: Sequence[Fault]) -> str:
    lasted = sorted(fault.seconds for fault in faults if fault.seconds)
    if not lasted:
        return str(len(faults))
    span = f"{lasted[0]:.1f}" if len(lasted) == 1 else f"{lasted[0]:.1f}–{lasted[-1]:.1f}"
    return f"{len(faults)} ({span} s)"
