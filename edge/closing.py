"""Base class of objects that are closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """Context manager that calls the subclass's `close` at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the object."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
