"""On Ascend, importing this makes the Dropout of Keras use an NPU operator. Here it changes nothing: Keras's own is
right.
"""
