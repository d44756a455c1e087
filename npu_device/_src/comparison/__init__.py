"""Trainings that are compared: what is kept of a step, what differs beyond rounding, and noise that is taken out."""
