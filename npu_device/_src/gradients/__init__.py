"""Lists of gradients on their way to the reduction."""
