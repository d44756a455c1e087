"""The engines whose transfers Python runs on numpy arrays: shared memory, TCP, MPI."""
