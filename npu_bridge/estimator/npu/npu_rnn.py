"""An RNN cell, unrolled."""

from npu_device._src.operators.recurrent_layers import npu_dynamic_rnn

__all__ = ["npu_dynamic_rnn"]
