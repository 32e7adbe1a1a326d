"""Files that are whole or not there."""

from pathlib import Path

import pytest

from devices.files import write_whole
from tests.support.small_disk import small_disk


def test_what_cannot_be_written_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, b"{}")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}'"


def test_a_full_disk_is_said_with_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        path = disk / "plan.json"
        write_whole(path, b"old")
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_whole(path, bytes(1 << 20))
        assert caught.value.filename == str(path)
        assert [(one.name, one.read_bytes()) for one in disk.iterdir()] == [("plan.json", b"old")]
