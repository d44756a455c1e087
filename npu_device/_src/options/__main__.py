"""``python -m npu_device._src.options`` prints the page ``docs/options.md``, made from the table of options."""

from __future__ import annotations

from npu_device._src.options.option import Rule
from npu_device._src.options.table import GLOBAL_OPTIONS

_HEAD = """\
# Options

Set Ascend's options before `npu.open()`:

```python
import npu_device as npu

npu.global_options().hcom_parallel = False
npu.open().as_default()
```

- An unknown name or value raises a `ValueError`, a wrong type a `TypeError`. Assign the members of a group
  (`dump_config`, …), not the group.
- An option has `.value`, the string on an NPU, and `.typed`. `as_dict()` returns all options that are set, as strings.
- An assignment after `npu.open()` is recorded, with one warning.

"""
_COLUMNS = """\
| Option | Type | Default | Allowed | Meaning on an NPU | Here |
|---|---|---|---|---|---|
"""
_WITHOUT = """
## Options without effect

These control the compiler, memory and tools of an NPU. They are checked and recorded, so that scripts run unchanged.

"""


def page() -> str:
    """Return the whole page as Markdown: first the options that do something."""
    rows = [(rule.effect.startswith("No effect"), _row(path, rule)) for path, rule in GLOBAL_OPTIONS.rules()]
    tables = ["".join(row for without, row in rows if without is wanted) for wanted in (False, True)]
    return f"{_HEAD}## Options with an effect\n\n{_COLUMNS}{tables[0]}{_WITHOUT}{_COLUMNS}{tables[1]}"


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
