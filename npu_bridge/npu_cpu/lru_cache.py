"""The cache of embeddings in the memory of the NPU. There is none here: the star import brings nothing."""

__all__: list[str] = []
