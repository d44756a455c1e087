"""Find the ranks of the job, and let them exchange messages. The lowest layer: it knows no tensors."""
