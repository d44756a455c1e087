"""The world of this process, the whole job or one of its groups: for training code and the calls of scripts."""

from __future__ import annotations

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.collectives.job import Job
from npu_device._src.training.opening import device
from npu_device._src.world.world import World


def current_world(group: str = WORLD_GROUP) -> World | None:
    """Return the job that this process is a rank of, or one of its groups; None on a single device. A job that the
    script hasn't opened is joined now, which may take as long as the other ranks need; a child process raises.
    """
    return _of_group(device.running_job(), group)


def world_unless_child(group: str = WORLD_GROUP) -> World | None:
    """Return the job as above; None also in a child process of a rank, whose model trains by itself."""
    return _of_group(device.unless_child(), group)


def _of_group(job: Job | None, group: str) -> World | None:
    if job is None:
        return None
    return World(job, job.group(group))
