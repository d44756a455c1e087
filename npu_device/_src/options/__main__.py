"""``python -m npu_device._src.options`` prints the page ``docs/options.md``, made from the table of options."""

from __future__ import annotations

from npu_device._src.options.option import Rule
from npu_device._src.options.table import GLOBAL_OPTIONS

_HEAD = """\
# Options

`npu.global_options()` returns one object for the process. Every option of Ascend's TF Adapter 2.x can be set on it,
before `npu.open()`:

```python
import npu_device as npu

npu.global_options().precision_mode = "allow_mix_precision"
npu.global_options().dump_config.enable_dump = False
npu.open().as_default()
```

- Reading an option returns an object. Its `.value` is the value as a string (`"1"` or `"0"` for booleans, `None` if
  unset); its `.typed` is the value with its own type. `as_dict()` returns all options that are set as strings,
  including those of groups, without the group's name.
- Assigning to an unknown name raises a `ValueError` that lists the valid names. A value that is not allowed raises a
  `ValueError`. A value of another type than the default's raises a `TypeError`; numpy integers and booleans count as
  Python's. An option that is unset by default may be set back to `None`.
- A group (`dump_config`, …) can't be assigned as a whole; assign its members.
- On an NPU, an assignment after `npu.open()` silently has no effect. Here the value is recorded, and the first such
  assignment logs a warning.
- Assigning a deprecated option logs a warning.

`hcom_parallel`, `profiling_config` and `aoe_config` have an effect. The other options control the NPU's compiler,
memory and tools, which don't exist here. They are checked and recorded, so that a script runs unchanged. The last
column says why an option has no effect, and what to use instead.

| Option | Type | Default | Allowed | Meaning on an NPU | Here |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the whole page as Markdown."""
    return _HEAD + "".join(_row(path, rule) for path, rule in GLOBAL_OPTIONS.rules())


def _row(path: str, rule: Rule) -> str:
    default = "unset" if rule.default is None else f"`{rule.default!r}`"
    meaning = rule.meaning + (" (deprecated)" if rule.deprecated else "")
    return f"| `{path}` | {_type(rule)} | {default} | {_allowed(rule)} | {meaning} | {rule.effect} |\n"


def _type(rule: Rule) -> str:
    example = rule.allowed[0] if rule.allowed else rule.default
    name = "any" if example is None else type(example).__name__
    return f"{name} or bool" if rule.bool_words else name


def _allowed(rule: Rule) -> str:
    if rule.between:
        return f"{rule.between[0]} to {rule.between[1]}"
    return ", ".join(f"`{value!r}`" for value in rule.allowed) or "any"


if __name__ == "__main__":
    print(page(), end="")
