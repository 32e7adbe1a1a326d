"""Test a worker that keeps reporting another sender of the slice: this device asks it with pauses, and stops at a
deadline.
"""

from pathlib import Path
from typing import Any

import pytest

from edge.cluster import client
from edge.cluster.client import Remote
from edge.errors import WorkerError
from partition.slices.recipe import whole


class Busy(Remote):
    """A worker that has nothing of a slice, and takes nothing; now and then it has a byte more."""

    offers = 0
    grows_to = 0

    def _offer(self, *_: Any) -> int | None:
        self.offers += 1
        return min(self.offers, self.grows_to)

    def _upload(self, *_: Any) -> None:
        raise WorkerError("pi: slice 0123 is being written by another process", "SliceBusy")


@pytest.mark.parametrize("grows_to", [0, 100])
def test_a_busy_slice_is_asked_for_with_pauses_until_its_deadline(
    grows_to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr("edge.cluster.client.time.sleep", paused.append)
    channel: Any = None
    worker = Busy(channel, "pi", 7070, None)
    worker.grows_to = grows_to
    model = tmp_path / "model"
    model.write_bytes(bytes(200))
    with pytest.raises(WorkerError, match="is being written by another process"):
        worker.send_slice(whole("0" * 64, 200), model, "0" * 64)
    assert set(paused) == {client._LOOK_S}
    assert client.CUT_TIMEOUT_S <= sum(paused) <= client.CUT_TIMEOUT_S + (grows_to + 1) * client._LOOK_S
