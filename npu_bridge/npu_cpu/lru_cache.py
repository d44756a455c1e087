"""The cache of embeddings in the NPU's memory. There is none here: the star import brings nothing."""

__all__: list[str] = []
