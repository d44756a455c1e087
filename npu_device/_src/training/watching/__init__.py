"""Watches training: equal starts, audits, applied gradients, the last word."""
