"""Opens the job, closes it, and says which job this process belongs to."""
