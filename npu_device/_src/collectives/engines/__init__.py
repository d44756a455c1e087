"""What moves tensors between ranks: within a host shared memory, between hosts an engine."""
