"""Records the times of the parts of a training step. Reading them is left to ``report``."""
