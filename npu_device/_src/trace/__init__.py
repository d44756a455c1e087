"""Records the times of the parts of a training step. What they mean is left to ``report``."""
