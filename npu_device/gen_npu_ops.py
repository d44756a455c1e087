"""Ascend's operators by their own names (``from npu_device import gen_npu_ops``); they live in ``operators`` and, those
that speak to other ranks, in ``training.hcom_ops``.
"""

from npu_device._src.operators.activations import fast_gelu, layer_norm
from npu_device._src.operators.activations import layer_norm as fused_layer_norm
from npu_device._src.operators.activations import prelu as p_relu
from npu_device._src.operators.activations import tanh_gelu as gelu
from npu_device._src.operators.adam_lamb import (
    adam_apply_one_assign,
    adam_apply_one_with_decay_assign,
    lamb_apply_optimizer_assign,
    lamb_apply_weight_assign,
    lars,
    lars_v2,
)
from npu_device._src.operators.float_status import (
    npu_alloc_float_status,
    npu_alloc_float_status_v2,
    npu_clear_float_status,
    npu_clear_float_status_v2,
    npu_get_float_status,
    npu_get_float_status_v2,
)
from npu_device._src.operators.recurrent import basic_lstm_cell, dynamic_augru, dynamic_gru_v2, dynamic_rnn
from npu_device._src.operators.refused import dropout_mask as drop_out_do_mask
from npu_device._src.operators.refused import dropout_mask as drop_out_do_mask_v3
from npu_device._src.operators.refused import dropout_mask as drop_out_gen_mask
from npu_device._src.operators.refused import dropout_mask as drop_out_gen_mask_v3
from npu_device._src.operators.refused import embeddingrankid as embedding_rank_id
from npu_device._src.operators.refused import gather_all_to_all_v as hcom_gather_all_to_all_v
from npu_device._src.operators.refused import gradient as basic_lstm_cell_c_state_grad
from npu_device._src.operators.refused import gradient as basic_lstm_cell_input_grad
from npu_device._src.operators.refused import gradient as basic_lstm_cell_weight_grad
from npu_device._src.operators.refused import gradient as dynamic_augru_grad
from npu_device._src.operators.refused import gradient as dynamic_gru_v2_grad
from npu_device._src.operators.refused import gradient as dynamic_rnn_grad
from npu_device._src.operators.refused import gradient as fast_gelu_grad
from npu_device._src.operators.refused import gradient as fused_layer_norm_grad
from npu_device._src.operators.refused import gradient as layer_norm_grad
from npu_device._src.operators.refused import remote_read as hcom_remote_read
from npu_device._src.operators.refused import remote_ref_read as hcom_remote_ref_read
from npu_device._src.operators.refused import remote_scatter_write as hcom_remote_scatter_write
from npu_device._src.operators.refused import remote_write as hcom_remote_write
from npu_device._src.training.hccl_ops import all_to_all_v as hcom_all_to_all_v
from npu_device._src.training.hccl_ops import all_to_all_v_c as hcom_all_to_all_vc
from npu_device._src.training.hcom_ops import (
    hcom_all_gather,
    hcom_all_reduce,
    hcom_broadcast,
    hcom_receive,
    hcom_reduce,
    hcom_reduce_scatter,
    hcom_send,
)

__all__ = [
    "adam_apply_one_assign",
    "adam_apply_one_with_decay_assign",
    "basic_lstm_cell",
    "basic_lstm_cell_c_state_grad",
    "basic_lstm_cell_input_grad",
    "basic_lstm_cell_weight_grad",
    "drop_out_do_mask",
    "drop_out_do_mask_v3",
    "drop_out_gen_mask",
    "drop_out_gen_mask_v3",
    "dynamic_augru",
    "dynamic_augru_grad",
    "dynamic_gru_v2",
    "dynamic_gru_v2_grad",
    "dynamic_rnn",
    "dynamic_rnn_grad",
    "embedding_rank_id",
    "fast_gelu",
    "fast_gelu_grad",
    "fused_layer_norm",
    "fused_layer_norm_grad",
    "gelu",
    "hcom_all_gather",
    "hcom_all_reduce",
    "hcom_all_to_all_v",
    "hcom_all_to_all_vc",
    "hcom_broadcast",
    "hcom_gather_all_to_all_v",
    "hcom_receive",
    "hcom_reduce",
    "hcom_reduce_scatter",
    "hcom_remote_read",
    "hcom_remote_ref_read",
    "hcom_remote_scatter_write",
    "hcom_remote_write",
    "hcom_send",
    "lamb_apply_optimizer_assign",
    "lamb_apply_weight_assign",
    "lars",
    "lars_v2",
    "layer_norm",
    "layer_norm_grad",
    "npu_alloc_float_status",
    "npu_alloc_float_status_v2",
    "npu_clear_float_status",
    "npu_clear_float_status_v2",
    "npu_get_float_status",
    "npu_get_float_status_v2",
    "p_relu",
]
