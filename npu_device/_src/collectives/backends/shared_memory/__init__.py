"""The backend for ranks that share a host: numpy on memory that their processes share."""
