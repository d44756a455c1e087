"""Collectives over groups of ranks, and the engines that move their data."""
