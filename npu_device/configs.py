"""Ascend's import path of the options for one block of code (``npu.configs.run_context_options``)."""

from npu_device._src.options.option_group import RunContextOptions, npu_run_context, run_context_options

__all__ = ["RunContextOptions", "npu_run_context", "run_context_options"]
