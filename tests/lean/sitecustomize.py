"""Spare processes with TensorFlow the last garbage collection, 0.8 s; forked ranks (``fork_server.py``) end as all
programs do.
"""

import atexit
import gc

atexit.register(gc.freeze)
