"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and finds where they diverge."""
