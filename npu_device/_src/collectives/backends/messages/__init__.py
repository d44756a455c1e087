"""Calls on little data, and the agreement on all others, as messages on the ranks' own connections."""
