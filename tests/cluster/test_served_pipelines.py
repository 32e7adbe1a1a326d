"""Test networks that `edge serve` computes over workers: concurrent requests, invalid requests, and lost devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from edge.onnx.samples import Feeds
from edge.serve.oip.computing import NetworkPipeline
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.works import Timing, Work, Works
from edge.tasks import SILENT
from tests.support.deployments import shared_workers
from tests.support.helpers import until
from tests.support.onnx_files import saved
from tests.support.onnx_pipelines import mixed, mixed_feeds, same, whole
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

NO_TIME = Timing()
N_REQUESTS = 30
BAD_IDS = np.array([[0, 99, 0]])  # a row that the table of `mixed` does not have
TIMEOUT_S = 120


@pytest.fixture(scope="module", name="two")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    with shared_workers(tmp_path_factory, "one", "two") as two:
        yield two


class Computed:
    """A pipeline over workers that computes in a thread."""

    def __init__(self, path: Path, two: list[Worker], replicas: bool = False) -> None:
        config = NetworkConfig(str(path), 1, ("local", *(item.address for item in two)), replicas=replicas)
        self.pipeline, self.works = NetworkPipeline(config, SILENT), Works()
        self.outputs: dict[int, Any] = {}
        self.thread = threading.Thread(target=self.pipeline.compute, args=(self.works, self.answer))
        self.thread.start()

    def put(self, number: int, feeds: Feeds) -> None:
        self.works.put(Work(number, feeds, ()))

    def answer(
        self, work: Work, outputs: Feeds | Exception, timing: Timing = NO_TIME, rows: int = 1, *, is_first: bool = True
    ) -> None:
        self.outputs[work.number] = outputs

    def wait(self, n: int) -> dict[int, Any]:
        until(lambda: len(self.outputs) >= n or not self.thread.is_alive(), f"outputs of {n} requests")
        return self.outputs


@contextmanager
def computing(folder: Path, two: list[Worker], replicas: bool = False) -> Iterator[Computed]:
    computed = Computed(saved(mixed(), folder / "mixed.onnx"), two, replicas)
    try:
        yield computed
    finally:
        computed.works.close()
        computed.thread.join(TIMEOUT_S)
        computed.pipeline.close()
        assert not computed.thread.is_alive()


@pytest.mark.parametrize("replicas", [False, True])
def test_requests_of_any_batch_get_their_own_outputs(tmp_path: Path, two: list[Worker], replicas: bool) -> None:
    with computing(tmp_path, two, replicas) as computed:
        assert len(computed.pipeline.about()["devices"]) == 3
        for i in range(N_REQUESTS):
            computed.put(i, mixed_feeds(1 + i % 3, i))
        outputs = computed.wait(N_REQUESTS)
        for i in range(N_REQUESTS):
            same(outputs[i], whole(mixed(), mixed_feeds(1 + i % 3, i)))


@pytest.mark.parametrize("replicas", [False, True])
def test_a_request_that_cannot_be_computed_fails_alone(tmp_path: Path, two: list[Worker], replicas: bool) -> None:
    with computing(tmp_path, two, replicas) as computed:
        for i in range(6):
            computed.put(i, {**mixed_feeds(1, i), **({"ids": BAD_IDS} if i == 2 else {})})
        computed.put(6, {**mixed_feeds(1, 6), "x": np.zeros((1, 7), np.float32)})
        outputs = computed.wait(7)
        assert isinstance(outputs[2], EngineError)
        assert "ONNX Runtime cannot run" in str(outputs[2])
        assert "takes the shape" in str(outputs[6])
        for i in (0, 1, 3, 4, 5):
            same(outputs[i], whole(mixed(), mixed_feeds(1, i)))


@pytest.mark.parametrize("replicas", [False, True])
def test_requests_survive_a_lost_device(tmp_path: Path, two: list[Worker], replicas: bool) -> None:
    with computing(tmp_path, two, replicas) as computed:
        for i in range(N_REQUESTS):
            computed.put(i, mixed_feeds(1, i))
        computed.wait(3)
        until(lambda: len(two[0].children()) == 1, "earlier sessions have ended")
        [child] = two[0].children()
        child.kill()
        for i in range(N_REQUESTS, 2 * N_REQUESTS):
            computed.put(i, mixed_feeds(1, i))
        outputs = computed.wait(2 * N_REQUESTS)
        for i in range(2 * N_REQUESTS):
            same(outputs[i], whole(mixed(), mixed_feeds(1, i)))
