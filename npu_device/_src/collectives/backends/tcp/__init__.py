"""The backend for CPU tensors of ranks that don't share memory: numpy arrays on the ranks' own connections."""
