"""The names under which scripts reach the operators: raw collectives, what is refused, what an import must not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from pool import Pool

import npu_device as npu
from npu_device import gen_npu_ops


def body_hcom() -> Any:
    handle = npu.open()
    rank, size = handle.worker_id, handle.workers_num
    own = tf.constant([rank + 1.0, 2.0])
    results = [
        gen_npu_ops.hcom_all_reduce(input=own, reduction="sum", fusion=1, fusion_id=-1, group="hccl_world_group"),
        gen_npu_ops.hcom_all_gather(input=own, rank_size=size, group="hccl_world_group"),
        *gen_npu_ops.hcom_broadcast(input=[own], root_rank=size - 1, fusion=0, fusion_id=-1, group="hccl_world_group"),
        gen_npu_ops.hcom_reduce(input=own, reduction="sum", root_rank=0, group="hccl_world_group"),
        gen_npu_ops.hcom_reduce_scatter(input=own, reduction="max", rank_size=size, group="hccl_world_group"),
    ]
    if rank == 0:
        gen_npu_ops.hcom_send(input=own * 5, sr_tag=3, dest_rank=1, group="hccl_world_group")
        results.append(own)
    else:
        results.append(gen_npu_ops.hcom_receive([2], T=tf.float32, sr_tag=3, src_rank=0, group="hccl_world_group"))
    return [result.numpy().tolist() for result in results]


def test_raw_collectives(two_ranks: Pool) -> None:
    zero, one = two_ranks.run(body_hcom)
    assert zero == [[3, 4], [1, 2, 2, 2], [2, 2], [3, 4], [2], [1, 2]]
    assert one[:3] == zero[:3]
    assert one[4:] == [[2], [5, 10]]


def body_imports() -> dict[str, Any]:
    import tensorflow as tf

    dropout = tf.keras.layers.Dropout
    methods = dict(vars(dropout))

    from npu_bridge.estimator.npu import npu_convert_dropout  # noqa: F401
    from npu_bridge.estimator.npu_aicore_ops import npu_aicore_ops
    from npu_bridge.helper import helper
    from npu_bridge.npu_cpu import npu_cpu_ops as custom_op
    from npu_bridge.tbe import npu_vector_ops
    from npu_bridge.tbe.npu_cube_ops import deformable_conv2d
    from npu_device import gen_npu_ops
    from npu_device.npu_device import gen_npu_ops as same

    assert same is gen_npu_ops is helper.get_gen_ops() is npu_aicore_ops
    assert tf.keras.layers.Dropout is dropout and dict(vars(dropout)) == methods
    texts = {}
    for name, call in {"conv": deformable_conv2d, "rank": custom_op.embeddingrankid}.items():
        try:
            call(np.ones([1, 4, 4, 1]), row_memory=4)
        except NotImplementedError as error:
            texts[name] = str(error)
    prelu = npu_vector_ops.PReLU(alpha_initializer=tf.constant_initializer(0.5))
    return {**texts, "prelu": np.array(prelu(np.array([[-2.0, 3.0]], np.float32))).tolist()}


def test_imports_change_nothing_and_refusals_say_what_to_do(single: Pool) -> None:
    (found,) = single.run(body_imports)
    assert "bilinearly" in found["conv"] and "all_to_all_v" in found["rank"]
    assert found["prelu"] == [[-1.0, 3.0]]
