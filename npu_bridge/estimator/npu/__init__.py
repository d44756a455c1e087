"""Ascend's Estimator, optimizers, hooks and settings. The star import loads the modules that ``__all__`` names."""

__all__ = [
    "keras_to_npu",
    "npu_callbacks",
    "npu_config",
    "npu_convert_dropout",
    "npu_dynamic_rnn",
    "npu_estimator",
    "npu_hook",
    "npu_loss_scale_manager",
    "npu_loss_scale_optimizer",
    "npu_optimizer",
    "npu_plugin",
    "npu_rnn",
    "npu_scope",
    "npu_strategy",
    "scoped_graph_manager",
    "util",
]
