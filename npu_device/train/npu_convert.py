"""On Ascend, importing this exchanges functions of TensorFlow for the NPU's (dropout). Here TensorFlow's own are right,
and nothing is exchanged.
"""
