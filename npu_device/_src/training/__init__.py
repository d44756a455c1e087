"""Opening and closing, Keras optimizers and callbacks, datasets, variables, and Ascend's collective operators."""
