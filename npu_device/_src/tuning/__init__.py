"""Which gradient splits ``npurun --tune`` tries, and which one wins."""
