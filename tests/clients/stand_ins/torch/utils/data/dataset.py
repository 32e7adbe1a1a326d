"""Data that are loaded one after the other."""

from typing import Generic, TypeVar

T = TypeVar("T")


class IterableDataset(Generic[T]):
    """Is iterated."""
