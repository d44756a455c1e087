"""Records the times of a training step's parts. Reading them is left to ``report``."""
