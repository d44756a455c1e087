"""``npurun --replicate``: an unchanged Keras script on many ranks."""
