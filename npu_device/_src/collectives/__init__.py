"""Collective operations over groups of ranks, one operation per file."""
