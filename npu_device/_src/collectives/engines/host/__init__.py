"""The engines whose operations Python runs on numpy arrays: shared memory, TCP, MPI."""
