"""The backend that works everywhere: TensorFlow's collective operations (ring over gRPC on CPU, NCCL on GPU)."""
