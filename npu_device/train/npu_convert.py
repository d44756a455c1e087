"""On Ascend, importing this exchanges functions of TensorFlow for those of the NPU (dropout). Here TensorFlow's own are
right, and nothing is exchanged.
"""
