"""The iteration trace: what happened when in a training step, and the report about it."""
