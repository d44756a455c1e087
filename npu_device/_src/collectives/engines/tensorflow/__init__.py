"""The engine that works everywhere: TensorFlow's collectives (ring over gRPC on CPU, NCCL on GPU)."""
