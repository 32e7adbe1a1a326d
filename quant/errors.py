"""Errors about model files and type names."""

from edge.errors import EdgeError


class QuantError(EdgeError):
    """Base of what this package raises for bad input; the message says what was found and what is needed."""


class ModelFileError(QuantError):
    """A file is not a usable model: not a GGUF, truncated, or with metadata that contradict its tensors."""


class UnknownTypeError(QuantError):
    """A tensor type is unknown; the message lists the known ones."""


class DoesNotFit(QuantError):
    """Even the smallest types exceed the budget. `least`: bytes that they take."""

    def __init__(self, least: int) -> None:
        super().__init__(f"even the smallest types take {least} bytes; allow so much, or more and smaller types")
        self.least = least
