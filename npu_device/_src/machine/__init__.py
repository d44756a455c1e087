"""What a host has: cores, caches and NUMA nodes, and what of it this process may use."""
