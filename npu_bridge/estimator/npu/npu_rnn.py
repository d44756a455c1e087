"""An RNN cell, unrolled."""

from npu_device._src.operators.recurrent_layers import npu_dynamic_rnn as npu_dynamic_rnn
