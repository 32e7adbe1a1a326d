"""A loader without workers."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class DataLoader(Generic[T]):
    """Gives each item of the data in a batch of its own."""

    def __init__(self, dataset: Iterable[T], collate_fn: Callable[[list[T]], Any], **_: Any) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __iter__(self) -> Iterator[Any]:
        return (self.collate_fn([item]) for item in self.dataset)
