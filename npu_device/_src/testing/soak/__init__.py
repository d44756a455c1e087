"""Trains a script twice, undisturbed and with faults of ranks and network at random times, and compares the results."""
