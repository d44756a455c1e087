"""``npu.distribute.replicate``: Keras's ``fit``, ``evaluate`` and ``predict`` on many ranks, as on one process.

Where a batch of ``fit`` goes in Keras 3, the first three calls each inside the one before:

- ``Replica._fit`` (``replica``), the ``fit`` of Keras
- ``Function.__call__`` (``function``), the train function that Keras has made
- ``train_or_test_step`` (``step``), the train step of Keras or of the script, on the share of this rank
- in that step, ``scale_loss`` of the optimizer, which multiplies the loss by the fraction of this rank (``weighting``)
- then ``apply_gradients`` of the optimizer (``optimizers.reducing_methods``), ``GradientReducer.apply``, which has
  ``WeightedReducer.reduce`` reduce the gradients, the method of Keras's class
"""
