"""Model files: opened and checked once for each command or session, and then handed down."""

from __future__ import annotations

import os

from partition.model.check import check_loadable
from quant.gguf.file import GgufFile
from quant.gguf.part import Part


class ModelFile(GgufFile):
    """File of a language model that llama.cpp can load, with the model's shape."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__(parts)
        self.shape = check_loadable(self)

    @classmethod
    def open(cls, path: ModelLike) -> ModelFile:
        """Open and check the model at `path`. Return a ModelFile unchanged.

        Raises ModelFileError if the file is damaged, or if loading it would crash llama.cpp.
        """
        return path if isinstance(path, ModelFile) else super().open(path)


ModelLike = str | os.PathLike[str] | ModelFile
"""Path of a model file, or the file if it is already open."""
