"""Ascend's operators by their own names (``from npu_device import gen_npu_ops``); they live in ``operators`` and, those
that speak to other ranks, in ``training.distribute.ascend_collectives``.
"""

from npu_device._src.operators.activations import (
    centralization as centralization,
    fast_gelu as fast_gelu,
    fast_gelu_v2 as fast_gelu_v2,
    fused_layer_norm as fused_layer_norm,
    layer_norm as layer_norm,
    npu_alloc_float_status as npu_alloc_float_status,
    npu_alloc_float_status_v2 as npu_alloc_float_status_v2,
    npu_clear_float_status as npu_clear_float_status,
    npu_clear_float_status_v2 as npu_clear_float_status_v2,
    npu_get_float_status as npu_get_float_status,
    npu_get_float_status_v2 as npu_get_float_status_v2,
    p_relu as p_relu,
    tanh_gelu as gelu,  # noqa: F401
)
from npu_device._src.operators.adam_lamb import (
    adam_apply_one_assign as adam_apply_one_assign,
    adam_apply_one_with_decay_assign as adam_apply_one_with_decay_assign,
    lamb_apply_optimizer_assign as lamb_apply_optimizer_assign,
    lamb_apply_weight_assign as lamb_apply_weight_assign,
    lars as lars,
    lars_v2 as lars_v2,
)
from npu_device._src.operators.dropout_masks import (
    drop_out_do_mask as drop_out_do_mask,
    drop_out_do_mask_v3 as drop_out_do_mask_v3,
    drop_out_gen_mask as drop_out_gen_mask,
    drop_out_gen_mask_v3 as drop_out_gen_mask_v3,
)
from npu_device._src.operators.gradients import (
    basic_lstm_cell_c_state_grad as basic_lstm_cell_c_state_grad,
    basic_lstm_cell_input_grad as basic_lstm_cell_input_grad,
    basic_lstm_cell_weight_grad as basic_lstm_cell_weight_grad,
    dynamic_augru_grad as dynamic_augru_grad,
    dynamic_gru_v2_grad as dynamic_gru_v2_grad,
    dynamic_rnn_grad as dynamic_rnn_grad,
    fast_gelu_grad as fast_gelu_grad,
    fused_layer_norm_grad as fused_layer_norm_grad,
    layer_norm_grad as layer_norm_grad,
)
from npu_device._src.operators.recurrent import (
    basic_lstm_cell as basic_lstm_cell,
    dynamic_augru as dynamic_augru,
    dynamic_gru_v2 as dynamic_gru_v2,
    dynamic_rnn as dynamic_rnn,
)
from npu_device._src.operators.refused import (
    embedding_rank_id as embedding_rank_id,
    hcom_gather_all_to_all_v as hcom_gather_all_to_all_v,
    hcom_remote_read as hcom_remote_read,
    hcom_remote_ref_read as hcom_remote_ref_read,
    hcom_remote_scatter_write as hcom_remote_scatter_write,
    hcom_remote_write as hcom_remote_write,
)
from npu_device._src.training.distribute.ascend_collectives import (
    hcom_all_gather as hcom_all_gather,
    hcom_all_reduce as hcom_all_reduce,
    hcom_all_to_all_v as hcom_all_to_all_v,
    hcom_all_to_all_vc as hcom_all_to_all_vc,
    hcom_broadcast as hcom_broadcast,
    hcom_receive as hcom_receive,
    hcom_reduce as hcom_reduce,
    hcom_reduce_scatter as hcom_reduce_scatter,
    hcom_send as hcom_send,
)
