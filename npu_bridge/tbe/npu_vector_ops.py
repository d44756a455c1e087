"""PReLU as a Keras layer, and the steps of Adam and LAMB."""

from tensorflow.keras.layers import PReLU as PReLU

from npu_device._src.operators.adam_lamb import (
    adam_apply_one_assign as adam_apply_one_assign,
    adam_apply_one_with_decay_assign as adam_apply_one_with_decay_assign,
    lamb_apply_optimizer_assign as lamb_apply_optimizer_assign,
    lamb_apply_weight_assign as lamb_apply_weight_assign,
)
