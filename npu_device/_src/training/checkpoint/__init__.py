"""``npu.train.JobCheckpoint``: checkpoints of all ranks of a job together, and stopping when asked to."""
