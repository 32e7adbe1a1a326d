"""Errors about model files and type names."""

from edge.errors import EdgeError


class QuantError(EdgeError):
    """Base of the errors that this package raises for bad input. The message names the found and the needed value."""


class ModelFileError(QuantError):
    """A file is not a usable model: not a GGUF, truncated, or with metadata that contradict its tensors."""


class UnknownTypeError(QuantError):
    """A tensor type is unknown; the message lists the known ones."""


class DoesNotFit(QuantError):
    """Even the smallest types exceed the budget. `least` is the number of bytes that they take."""

    def __init__(self, least: int) -> None:
        super().__init__(f"even the smallest types take {least} bytes; allow as much, or use more and smaller types")
        self.least = least
