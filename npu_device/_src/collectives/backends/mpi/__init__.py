"""The backend for ranks that are the processes of one MPI job: numpy arrays through mpi4py."""
