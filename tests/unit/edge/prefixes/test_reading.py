"""Test `n_bytes` of the blocks of a history: the same for blocks that wait to be written, are in a file, or are being
written.
"""

from pathlib import Path

from edge.prefixes.reading import HistoryReader, Run
from edge.prefixes.store import PrefixStore

HASHES = [b"a" * 32, b"b" * 32]


class WritingStore(PrefixStore):
    """A store whose queue is written by another thread at the worst moment: right after a file was not n_bytes."""

    def __init__(self, folder: Path, queue: dict[bytes, Run]) -> None:
        super().__init__(folder, 1 << 20)
        self._queue = queue

    def n_bytes(self, name: bytes) -> int | None:
        n_bytes = super().n_bytes(name)
        self._queue.clear()
        return n_bytes


def test_block_that_leaves_the_queue_after_its_file_was_missed_is_still_read(tmp_path: Path) -> None:
    queue = {HASHES[0]: Run(HASHES, bytearray(b"blocks"))}
    reader = HistoryReader(WritingStore(tmp_path, queue), HASHES, lambda block: block, queue.get)
    [content] = reader.read(memoryview(bytearray(1 << 12)))
    assert (bytes(content.data), content.n_shared) == (b"blocks", 2)
    assert reader.read(memoryview(bytearray(1 << 12))) == []


def test_block_neither_queued_nor_in_a_file_ends_the_history(tmp_path: Path) -> None:
    reader = HistoryReader(PrefixStore(tmp_path, 1 << 20), HASHES, lambda block: block, lambda block: None)
    assert reader.read(memoryview(bytearray(1 << 12))) == []
