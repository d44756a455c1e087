"""``npu_vector_ops`` and ``npu_cube_ops``."""
