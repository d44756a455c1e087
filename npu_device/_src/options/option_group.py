"""The object that scripts fill: its attributes are options or groups of options, as declared in ``table``.

Every assignment is one store of one checked value, so threads may assign at the same time without a lock.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from npu_device._src.options.table import RULES, Rule

_log = logging.getLogger("npu_device")


class Option:
    """The result of reading an option; it follows later assignments."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._value = rule.default

    @property
    def value(self) -> str | None:
        """Return the value as Ascend's adapter does: a text, ``"1"`` or ``"0"`` for booleans, None if unset."""
        if self._value is None:
            return None
        if isinstance(self._value, bool):
            return str(int(self._value))
        return str(self._value)

    @property
    def typed(self) -> Any:
        """Return the value with the type it was assigned with; None if unset."""
        return self._value

    def assign(self, value: Any) -> None:
        """Check a value and keep it. Raises like ``checked`` of ``Rule``."""
        rule = self._rule
        self._value = rule.checked(value)
        if rule.is_deprecated:
            _log.warning(
                "option %r is deprecated and may be removed from Ascend's adapter", rule.path
            )

    def __repr__(self) -> str:
        return f"<option {self._rule.path}: {self._value!r}>"


class OptionGroup:
    """Options as attributes: assigning checks and keeps the value, reading gives an ``Option``.

    Raises:
        ValueError: on assigning an unknown name (the text lists the valid ones), a whole group, or an invalid value.
        TypeError: on assigning a value whose type is not that of the default.
        AttributeError: on reading an unknown name.

    Source: Ascend TF Adapter 2.x, ``npu.global_options``.
    """

    # These declarations are for the type checker. ``__init__`` puts the attributes into ``__dict__``, since
    # ``__setattr__`` handles options only.
    _title: str  # what messages call a root
    _rules: Sequence[Rule]  # of all options, those of further groups too
    _options: dict[str, Option | OptionGroup]
    _prefix: str
    _root: OptionGroup
    _warns: bool | None  # the root's: the next assignment logs a warning; None before ``freeze``

    def __init__(
        self, rules: Sequence[Rule], *, prefix: str = "", root: OptionGroup | None = None
    ) -> None:
        root = root or self
        options: dict[str, Option | OptionGroup] = {}
        for rule in rules:
            name, dot, _ = rule.path.removeprefix(prefix).partition(".")
            if not dot:
                options[name] = Option(rule)
            elif name not in options:
                path = f"{prefix}{name}."
                below = [rule for rule in rules if rule.path.startswith(path)]
                # The root warns once for all of its groups.
                options[name] = OptionGroup(below, prefix=path, root=root)
        self.__dict__.update(
            options, _rules=rules, _options=options, _prefix=prefix, _root=root, _warns=None
        )

    def __getattr__(self, name: str) -> Any:
        # Python looks for __deepcopy__ and the like on an object whose __dict__ is still empty.
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        option = self._options.get(name)
        if option is None:
            raise ValueError(self._unknown(name))
        path = self._prefix + name
        if isinstance(option, OptionGroup):
            names = ", ".join(f"{path}.{below}" for below in option._options)
            raise ValueError(
                f"{path!r} is a group of options and can't be assigned as a whole; assign to {names}"
            )
        option.assign(value)
        if self._root._warns:
            self._root.__dict__["_warns"] = False
            _log.warning(
                "option %r was assigned after npu.open(): it is recorded, but would have no effect on an NPU. "
                "Assign options before npu.open(). Further late assignments are not reported.",
                path,
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.as_dict()}>"

    def as_dict(self) -> dict[str, str]:
        """Return the options that are set, including those of groups: plain name to text."""
        flat = {}
        for name, option in self._options.items():
            if isinstance(option, OptionGroup):
                flat.update(option.as_dict())
            elif option.value is not None:
                flat[name] = option.value
        return flat

    def _unknown(self, name: str) -> str:
        """Return the error for a name that the group doesn't have, with one that may be meant."""
        group = self._prefix.rstrip(".") or self._title
        # Options of this name in other groups come first, since they are more likely meant than similar ones in this
        # group.
        paths = [rule.path for rule in self._root._rules]
        guesses = [path for path in paths if path.rpartition(".")[2] == name]
        matches = difflib.get_close_matches(name, self._options, n=1)
        guesses += [self._prefix + match for match in matches]
        ending = "."
        if guesses:
            ending = f"; did you mean {guesses[0]!r}?"
        return f"{group} has no option {name!r}{ending}\nValid names: {', '.join(self._options)}"


class GlobalOptions(OptionGroup):
    """All options of a process, with their defaults. Scripts use the one that ``global_options()`` returns."""

    _title = "global_options"

    def __init__(self) -> None:
        super().__init__(RULES)

    def freeze(self) -> None:
        """Log a warning at the next assignment, because ``npu.open()`` has read the options."""
        if self._warns is None:
            self.__dict__["_warns"] = True


_options = GlobalOptions()


@contextlib.contextmanager
def new_options() -> Iterator[None]:
    """Give the block the options of a new process, and put those of this one back after it."""
    global _options
    before = _options
    _options = GlobalOptions()
    try:
        yield
    finally:
        _options = before


def global_options() -> GlobalOptions:
    """Return the options of this process, the same object at every call; set them before ``npu.open()``.

    ``global_options().precision_mode = "allow_mix_precision"`` sets an option;
    ``global_options().precision_mode.value`` reads it, as text. Every rank sets its own.

    >>> global_options().hcom_parallel.value
    '1'

    Source: Ascend TF Adapter 2.x, ``npu.global_options``.
    """
    return _options


class RunContextOptions(OptionGroup):
    """The result of ``run_context_options``; its attributes work like those of ``npu.global_options()``."""

    _title = "run_context_options"

    def __init__(self) -> None:
        super().__init__([rule for rule in RULES if "graph_memory_optimize" in rule.path])


def run_context_options() -> RunContextOptions:
    """Return new options for one ``npu_run_context`` block, which are checked and recorded, without effect.

    >>> options = run_context_options()
    >>> options.experimental.graph_memory_optimize_config.recompute = "auto"

    Source: Ascend TF Adapter 2.x, ``npu.configs.run_context_options``.
    """
    return RunContextOptions()


@contextlib.contextmanager
def npu_run_context(options: RunContextOptions | None = None) -> Iterator[None]:
    """Run a block with its own options. The block runs unchanged here, because the options have no effect.

    Args:
        options: the result of ``run_context_options()``, or None.

    Raises:
        ValueError: ``options`` is something else.

    Source: Ascend TF Adapter 2.x, ``npu.npu_run_context``.
    """
    if options is not None and not isinstance(options, RunContextOptions):
        raise ValueError(
            f"npu_run_context takes what npu.configs.run_context_options() returns; found {options!r} "
            f"of type {type(options).__name__}"
        )
    yield
