"""Starts the tasks of a job step as Slurm's srun does, all on this machine: sets their variables, waits for them, and
returns the highest exit code. ``fake_srun.py NODES TASKS_PER_NODE COMMAND…``; the first node is localhost.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    nodes, per_node, *command = sys.argv[1:]
    names = ["localhost", *(f"node{number}" for number in range(1, int(nodes)))]
    size = len(names) * int(per_node)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": ",".join(names),
    }
    tasks = []
    for rank in range(size):
        node, local = divmod(rank, int(per_node))
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": names[node]}
        tasks.append(subprocess.Popen(command, env={**os.environ, **step, **place}))
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
