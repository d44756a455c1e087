"""``npu_cpu_ops`` and ``lru_cache``."""
