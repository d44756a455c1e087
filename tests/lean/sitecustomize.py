"""Spare processes with TensorFlow the last garbage collection, 0.8 s; forked ranks (``fork_server.py``) end as all
programs do.
"""

import atexit
import gc
from pathlib import Path

if b"fork_server.py" not in Path("/proc/self/cmdline").read_bytes():
    atexit.register(gc.freeze)
