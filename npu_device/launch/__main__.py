"""The launcher's entry point: the console script ``npurun`` and ``python -m npu_device.launch``."""

from __future__ import annotations

import sys

from npu_device.launch import arguments, check, hosts, job, tune


def main() -> None:
    """Run the launcher with the command line of this process, and exit with the job's exit code."""
    options = arguments.parse(sys.argv[1:])
    if options.hosts:
        sys.exit(hosts.run(options))
    if options.check:
        sys.exit(check.run(options))
    sys.exit(tune.run(options) if options.tune else job.run(options))


if __name__ == "__main__":
    main()
