"""Opening and closing, Keras optimizers and callbacks, data sets, variables, and Ascend's collective operators."""
