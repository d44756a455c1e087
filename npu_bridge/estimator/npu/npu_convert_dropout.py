"""On Ascend, importing this makes Keras's Dropout use the NPU's operator. Here Keras's own is right, and nothing is
changed.
"""
