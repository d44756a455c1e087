"""The backend: calls on little data, and the comparison of the others."""

from __future__ import annotations

import sys
from functools import partial

from npu_device._src.cluster.runtime import Runtime
from npu_device._src.collectives.backends.arrays.lines import GroupLine, Line, Lines, PairLine
from npu_device._src.collectives.backends.arrays.mailbox import Mailbox
from npu_device._src.collectives.backends.arrays.operations import ComparingBackend
from npu_device._src.collectives.backends.messages import programs
from npu_device._src.collectives.backends.messages.channel import Channel, inbox_number
from npu_device._src.collectives.backends.messages.slots import MessageSlots
from npu_device._src.collectives.group import Group

_BACKGROUND_FROM_BYTES = sys.maxsize


def _mailbox(runtime: Runtime, pair: Group) -> Mailbox:
    slots = MessageSlots(runtime.peers, pair.ranks[1 - pair.rank], inbox_number(pair))
    return Mailbox(slots, slots.check, lambda: None)


def _line(runtime: Runtime, group: Group) -> Line:
    if group.tag is None:
        return GroupLine(runtime, group, partial(Channel, runtime, group), _BACKGROUND_FROM_BYTES)
    return PairLine(runtime, group, partial(_mailbox, runtime, group))


messages = ComparingBackend(programs, Lines(_line))
