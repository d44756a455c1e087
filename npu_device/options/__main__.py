"""``python -m npu_device.options`` prints the page ``docs/options.md``."""

from __future__ import annotations

from npu_device.options.page import page

print(page(), end="")
