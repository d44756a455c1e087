"""Ascend's import path of the options for one block of code (``npu.configs.run_context_options``)."""

from npu_device._src.options.option_group import (
    RunContextOptions as RunContextOptions,
    npu_run_context as npu_run_context,
    run_context_options as run_context_options,
)
