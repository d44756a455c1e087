"""PReLU as a Keras layer, and the steps of Adam and LAMB."""

from tensorflow.keras.layers import PReLU

from npu_device._src.operators.adam_lamb import (
    adam_apply_one_assign,
    adam_apply_one_with_decay_assign,
    lamb_apply_optimizer_assign,
    lamb_apply_weight_assign,
)

__all__ = [
    "PReLU",
    "adam_apply_one_assign",
    "adam_apply_one_with_decay_assign",
    "lamb_apply_optimizer_assign",
    "lamb_apply_weight_assign",
]
