"""Options for one block of code: ``npu.configs.run_context_options`` and ``npu.npu_run_context``.

The options of the whole process are ``npu.global_options()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from npu_device._src.options import OptionGroup
from npu_device._src.options.option import Section
from npu_device._src.options.table import GRAPH_MEMORY_OPTIMIZE_CONFIG

_RUN_CONTEXT = Section("run_context_options", (Section("experimental", (GRAPH_MEMORY_OPTIMIZE_CONFIG,)),))


class RunContextOptions(OptionGroup):
    """The result of ``run_context_options``; its attributes work like those of ``npu.global_options()``."""

    def __init__(self) -> None:
        super().__init__(_RUN_CONTEXT)


def run_context_options() -> RunContextOptions:
    """Return options for one ``npu_run_context`` block.

    Returns:
        A new object with ``experimental.graph_memory_optimize_config``. Its options are checked and recorded; they have
        no effect here.

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
