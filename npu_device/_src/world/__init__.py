"""The ranks of a job or a group, as one of them sees them; and the step that runs in it."""
