"""What a session is fed with in its training steps: each rank takes its share of the batches, and numbers stay."""

from __future__ import annotations

import enum
from typing import Any

import libcst as cst
from libcst import matchers

from npu_device._src.port.loop_data import SHARE, is_slice
from npu_device._src.port.nodes import argument, bounded, dotted, is_call_of, method
from npu_device._src.port.port import DONE, OPEN, Port
from npu_device._src.port.rules import WORDS_BY_TOPIC
from npu_device._src.port.script import Assignment

_PLACEHOLDER = "tensorflow.placeholder"
_OPERATIONS = (cst.BinaryOperation, cst.UnaryOperation, cst.IfExp, cst.AugAssign)
_INDEXED = matchers.Subscript(slice=[matchers.SubscriptElement(matchers.Index(matchers.Name()))])


class Feed(enum.Enum):
    """What a value is that a session is fed with."""

    BATCH = enum.auto()
    NUMBER = enum.auto()
    UNKNOWN = enum.auto()


def divide_feed(port: Port, call: Any) -> None:
    """Divide what the training step of a session is fed with."""
    feeds = {}
    # The dictionary may have a name: feed_dict=feed, where feed = {x: …}
    feed_dict = port.meant(argument(call, "feed_dict", 1))
    if isinstance(feed_dict, cst.Dict):
        reader = _Reader(port, call)
        for pair in feed_dict.elements:
            feeds[pair.value] = Feed.NUMBER
            if not (isinstance(pair, cst.DictElement) and _takes_number(port, pair.key)):
                feeds[pair.value] = reader.feed(pair.value)
    if Feed.BATCH not in feeds.values() or Feed.UNKNOWN in feeds.values():
        port.report(OPEN, "no dataset", call, _question(port, feeds))
        return
    for node, feed in feeds.items():
        if feed is not Feed.BATCH:
            continue
        template = "{}"
        if isinstance(node, _OPERATIONS) and not node.lpar:
            template = "({})"
        port.replace(node, template + SHARE)
    port.report(DONE, "share of an array", call)


def _takes_number(port: Port, key: Any) -> bool:
    """Return True for a placeholder of a single number."""
    made = port.meant(key)
    if not isinstance(made, cst.Call) or not port.name(made.func).startswith(_PLACEHOLDER):
        return False
    shape = argument(made, "shape", 1)
    return isinstance(shape, (cst.List, cst.Tuple)) and not shape.elements


def _question(port: Port, feeds: dict) -> str:
    """Return the question that names what is fed if it may be a batch or a number; "" for that of the rule."""
    unknown = [port.text(node) for node, feed in feeds.items() if feed is Feed.UNKNOWN]
    if not unknown:
        return ""
    return (
        f"What do the ranks divide? {', '.join(unknown)} may be a batch or a number. A number needs a placeholder of "
        "shape []; a batch, a slice such as x[begin:end] in this loop."
    )


class _Reader:
    """Follows a value back to what the loops around a call make it of."""

    def __init__(self, port: Port, call: Any) -> None:
        self._port = port
        statements = port.around(call)
        self._loops = [outer for outer in statements if isinstance(outer, (cst.For, cst.While))]

    @bounded(Feed.UNKNOWN)
    def feed(self, node: Any) -> Feed:
        is_truth = self._port.text(node) in ("True", "False")
        if is_truth or isinstance(node, (cst.Integer, cst.Float)):
            return Feed.NUMBER
        if is_slice(node) or self._has_indices_of_batch(node):
            return Feed.BATCH
        # The test of a conditional expression says nothing of its value.
        if isinstance(node, cst.IfExp):
            return self._of_operands([node.body, node.orelse])
        # An assignment such as rate *= 0.5 changes a value in place.
        if isinstance(node, _OPERATIONS):
            operands = [child for child in node.children if isinstance(child, cst.BaseExpression)]
            return self._of_operands(operands)
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if dotted(node):
            return self._of_name(node)
        return Feed.UNKNOWN

    def _has_indices_of_batch(self, node: Any) -> bool:
        """Return True for x[batch], where batch = order[begin:end]."""
        if not matchers.matches(node, _INDEXED):
            return False
        index = node.slice[0].slice.value
        return bool(dotted(node.value)) and self.feed(index) is Feed.BATCH

    def _of_operands(self, operands: list) -> Feed:
        feeds = {self.feed(operand) for operand in operands}
        # A batch with anything else has the samples of the batch.
        if Feed.BATCH in feeds:
            return Feed.BATCH
        if feeds == {Feed.NUMBER}:
            return Feed.NUMBER
        return Feed.UNKNOWN

    def _of_call(self, call: Any) -> Feed:
        values = self._port.origins(call)
        if self._gives_number(call):
            values = [arg.value for arg in call.args]
        # A batch among them doesn't make the result one: len(batch)
        if self._of_operands(values) is Feed.NUMBER:
            return Feed.NUMBER
        return Feed.UNKNOWN

    def _gives_number(self, call: Any) -> bool:
        return self._port.called_word(call) in WORDS_BY_TOPIC["gives a number"]

    def _of_name(self, node: Any) -> Feed:
        assignment = self._port.assigned(node)
        if assignment is None:
            return Feed.UNKNOWN
        value = assignment.value
        if isinstance(value, cst.For):
            return self._of_loop(node, value)
        values = self._port.origins(node)
        if isinstance(value, cst.AugAssign):
            values = [value]
        feed = self._of_operands(values)
        if feed is Feed.NUMBER:
            return feed
        is_in_loop = any(outer in self._loops for outer in self._port.around(assignment.statement))
        # What comes from outside of the loop isn't a batch, but all of the data.
        if is_in_loop and (feed is Feed.BATCH or self._makes_batch(assignment)):
            return Feed.BATCH
        return Feed.UNKNOWN

    def _of_loop(self, node: Any, loop: Any) -> Feed:
        """Return what the variable of a loop is: a number if the loop counts."""
        counts = is_call_of(loop.iter, "range")
        # The first of several is the count: for step, batch in enumerate(batches)
        if is_call_of(loop.iter, "enumerate") and isinstance(loop.target, cst.Tuple):
            counts = dotted(loop.target.elements[0].value) == dotted(node)
        if counts:
            return Feed.NUMBER
        # It may be one sample after the other.
        return Feed.UNKNOWN

    def _makes_batch(self, assignment: Assignment) -> bool:
        """Return True if what a loop assigns isn't known, but looks like a batch."""
        value = assignment.value
        if isinstance(value, cst.Subscript):
            index = value.slice[0].slice
            if isinstance(index, cst.Slice) or isinstance(index.value, cst.Integer):
                return True
            # An element that the loop counts to may be a number: rates[epoch]
            return self.feed(index.value) is not Feed.NUMBER
        if not isinstance(value, cst.Call):
            return isinstance(value, cst.ListComp)
        # Several values are a batch and its labels: x, y = batch_of(step)
        if assignment.position is not None or method(value) in WORDS_BY_TOPIC["draws"]:
            return True
        # One value may be a rate: rate = schedule(epoch)
        feed = self._of_operands([arg.value for arg in value.args])
        return feed is not Feed.NUMBER and not self._gives_number(value)
