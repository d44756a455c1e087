"""``python -m npu_device.testing.soak``: see ``docs/reliability.md``."""

import sys

from npu_device._src.testing.soak.disturbed_job import main

if __name__ == "__main__":
    sys.exit(main())
