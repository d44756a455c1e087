"""``from npu_bridge.estimator import npu_ops``: dropout, LARS, steps of Adam, a cell of an LSTM, and the start and the
end of the system.
"""

from npu_device import gen_npu_ops
from npu_device._src.operators.activations import dropout
from npu_device._src.operators.adam_lamb import (
    adam_apply_one_assign,
    adam_apply_one_with_decay_assign,
    lars as LARS,
    lars_v2 as LARSV2,
)
from npu_device._src.operators.recurrent import basic_lstm_cell
from npu_device._src.tf1.system import initialize_system, shutdown_system

__all__ = [
    "LARS",
    "LARSV2",
    "adam_apply_one_assign",
    "adam_apply_one_with_decay_assign",
    "basic_lstm_cell",
    "dropout",
    "gen_npu_ops",
    "initialize_system",
    "shutdown_system",
]
