"""``python -m npu_device._src.options`` prints the page ``docs/options.md``."""

from __future__ import annotations

from npu_device._src.options.options_page import page

print(page(), end="")
