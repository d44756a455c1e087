"""On Ascend, importing this makes Keras's Dropout use the NPU's operator. Here it changes nothing: Keras's own is
right.
"""
