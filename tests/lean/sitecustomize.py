"""Spare processes with TensorFlow the last garbage collection, 0.8 s, and most of those of its import, 0.2 of 2.4 s.
Forked ranks (``fork_server.py``) collect and end as all programs do.
"""

import atexit
import gc
from pathlib import Path

if b"fork_server.py" not in Path("/proc/self/cmdline").read_bytes():
    gc.set_threshold(20_000, 50, 100)
    atexit.register(gc.freeze)
