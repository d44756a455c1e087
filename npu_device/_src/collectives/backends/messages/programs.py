"""The operations as programs on a channel, for data that fit into the first round."""

from __future__ import annotations

import functools
from typing import Any, Callable

from npu_device._src.collectives.backends.arrays import small
from npu_device._src.collectives.backends.arrays.engine import Program
from npu_device._src.collectives.backends.messages.channel import Channel


def _in_one_round(program: Callable[..., small.IsDone]) -> Callable[..., Program]:
    @functools.wraps(program)
    def run(channel: Channel, *args: Any, **kwargs: Any) -> Program:
        if not (yield from program(channel, *args, **kwargs)):
            raise AssertionError(f"{program.__name__}: data that don't fit into a message; choice.carries is wrong")

    return run


all_reduce = _in_one_round(small.all_reduce)
reduce = _in_one_round(small.reduce)
broadcast = _in_one_round(small.broadcast)
all_gather = _in_one_round(small.all_gather)
all_to_all = _in_one_round(small.all_to_all)
meet = small.meet
