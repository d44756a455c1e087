"""What the backends have in common that Python runs on numpy arrays: shared memory, and MPI."""
