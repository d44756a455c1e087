"""The backend of ranks that share a host: numpy on memory that their processes have in common."""
