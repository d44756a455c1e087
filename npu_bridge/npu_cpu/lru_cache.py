"""The cache of embeddings in the NPU's memory, which there is none of here: the star import brings nothing."""

__all__: list[str] = []
