"""An RNN cell, run over a sequence."""

from npu_device._src.operators.recurrent import npu_dynamic_rnn as npu_dynamic_rnn
