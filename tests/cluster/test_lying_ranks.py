"""Test ranks that send wrong data to the owner, and owners that send wrong data to a rank: each gets an error."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge.cluster import session
from edge.cluster.llm_ranks import LlmRanks
from edge.errors import EdgeError, EngineError
from edge.models.demo import MODEL_PATH
from edge.parallel.follower import follow
from edge.parallel.masks import pack as pack_masks
from edge.parallel.shard import Shard
from edge.parallel.steps import Decode, End, Keep, Read, Remove, Shift, Write, pack
from edge.parallel.topology import place
from partition.model.file import ModelFile
from partition.plan.plan import Range
from partition.state.sequence import KVBlock, LayerRows, encode
from tests.conftest import Synthetic
from tests.support import memory_link
from tests.support.deployments import EXACT, deployed, pipeline
from tests.support.helpers import TIMEOUT_S
from tests.support.links import start
from tests.support.slices import whole, write
from tests.support.workers import Worker
from transport.collective import Group
from transport.errors import ProtocolError, TransportError
from transport.frame import Frame, Kind
from transport.link import Deadlines

pytestmark = pytest.mark.usefixtures("two")


class Lying:
    """A link over which something else comes than was sent."""

    def __init__(self, link: Any, change: Callable[[Any], None] | None = None, payload: bytes = b"") -> None:
        self._link, self._change, self._payload = link, change, payload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def receive_into(self, buffer: Any, *args: Any) -> None:
        self._link.receive_into(buffer, *args)
        if self._change:
            self._change(buffer)

    def receive(self, *args: Any) -> Frame:
        frame: Frame = self._link.receive(*args)
        return frame._replace(payload=self._payload)


ANSWERS = (
    b"",
    b"null",
    b"3",
    b'"decode"',
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"decode": 3}',
    b'{"decode": {"steps": 1}}',
    b'{"decode": {"steps": "many", "compute_ms": {"median": 1, "p99": 1}}}',
    b'{"prefill": null}',
    json.dumps({"decode": {name: {"median": 1, "p99": 1} for name in ("compute_ms", "stall_ms")}}).encode(),
)


@contextmanager
def lying(deployment: LlmRanks, change: Callable[[Any], None] | None = None, payload: bytes = b"") -> Iterator[None]:
    """Rank 1 lies inside the block, and is forgiven at its end."""
    engine = deployment.engine
    links = engine.group.links
    true = links[1]
    links[1] = Lying(true, change, payload)  # type: ignore[assignment]
    try:
        yield
    finally:
        links[1] = true
        engine.failed = None


def test_times_that_are_none(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REASON_S", 0.02)  # nobody else has a word to say
    with deployed(two[:1], MODEL_PATH, pipeline(1, 1)) as deployment:
        for answer in ANSWERS:
            with lying(deployment, payload=answer), pytest.raises((EdgeError, TransportError)) as caught:
                deployment.engine.times()
            assert "rank 1" in str(caught.value)
            assert "\n" not in str(caught.value)
        assert len(deployment.engine.times()) == 2


def test_logits_of_tokens_that_are_none(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REASON_S", 0.02)  # nobody else has a word to say
    with deployed(two[:1], MODEL_PATH, pipeline(1, 1)) as deployment:
        engine = deployment.engine
        for position, where in enumerate((-1, 1 << 20)):

            def change(result: Any) -> None:
                result[0, 1] = where  # noqa: B023

            with lying(deployment, change):
                with pytest.raises(ProtocolError, match=r"rank 1 \(one\) sent logits of tokens that it does not hold"):
                    engine.decode([5], position, top=3)
                with pytest.raises(ProtocolError, match=r"rank 1 \(one\) sent logits"):
                    engine.decode([5], position + 1)
        assert engine.decode([5], 2).shape == (engine.shape.n_vocab,)


@pytest.fixture(scope="module")
def stage(synthetic: Synthetic, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    """The last of two stages, in this process."""
    model = synthetic("llama", "f32")
    path = write(model, whole(ModelFile.open(model), Range(1, 2)), tmp_path_factory.mktemp("s") / "stage.gguf")
    shard = Shard(ModelFile.open(path), replace(EXACT, sequences=2), place(1, [1, 1]))
    yield shard
    shard.close()


def follow_all(stage: Shard, frames: Sequence[tuple[bytes, Kind]]) -> tuple[BaseException | None, list[Frame]]:
    """Send frames to a rank; return how it ends, and what it sends."""
    stage.engine.kv_clear()
    ours, theirs = memory_link.pair(deadlines=Deadlines(step_timeout_s=1.0))
    done = start(follow, stage, Group(1, {0: theirs}))
    for payload, kind in frames:
        ours.send(payload, kind)
    came = []
    if not frames or frames[-1][0] == pack(End(), stage.rows):
        assert done.exception(TIMEOUT_S) is None
    error = done.exception(TIMEOUT_S)
    theirs.close()
    try:
        while True:
            came.append(ours.receive(0))
    except TransportError:
        ours.close()
    return error, came


def decode_step(
    stage: Shard, rows: int = 1, sequence: int = 0, position: int = 0, top: int = 0, masks: bytes = b""
) -> bytes:
    """A decode whose last row gives logits."""
    stage.rows.positions[:rows] = range(position, position + rows)
    stage.rows.sequences[:rows] = sequence
    stage.rows.outputs[:rows] = 0
    stage.rows.outputs[rows - 1] = 1
    return pack(Decode(rows, 1, top, masks=masks), stage.rows)


def test_a_rank_that_is_told_the_truth(stage: Shard) -> None:
    state = np.ones((1, 128), np.float32).tobytes()
    end = (pack(End(), stage.rows), Kind.CONTROL)
    error, came = follow_all(stage, [(decode_step(stage), Kind.CONTROL), (state, Kind.DATA), end])
    assert error is None
    assert [len(frame.payload) for frame in came] == [4 * 512]
    logits = np.frombuffer(came[0].payload, np.float32)
    mask = np.arange(512) % 5 == 0
    masked = decode_step(stage, top=3, masks=pack_masks((0, 512), [mask]))
    error, came = follow_all(stage, [(masked, Kind.CONTROL), (state, Kind.DATA), end])
    assert error is None
    where, bits = np.frombuffer(came[0].payload, np.int32).reshape(2, 6)
    assert {*where} == {*np.argsort(logits)[-3:], *np.argsort(np.where(mask, logits, -np.inf))[-3:]}
    np.testing.assert_array_equal(bits.view(np.float32), logits[where])


@pytest.mark.parametrize(
    "lie",
    [
        "noise",
        "nothing",
        "data",
        "short states",
        "long states",
        "states first",
        "another sequence",
        "no sequence",
        "no",
        "keys of no sequence",
        "keys of no positions",
        "keys of all positions",
        "keys written to no sequence",
        "keys kept of no sequence",
        "a mask of noise",
        "a mask of another vocabulary",
        "a mask for more ranks",
        "a mask of no token",
    ],
)
def test_a_rank_that_is_told_lies(stage: Shard, lie: str) -> None:
    """It ends with an error, and the process goes on."""
    state, step = np.ones((1, 128), np.float32).tobytes(), decode_step(stage)
    control, data = Kind.CONTROL, Kind.DATA
    shape = stage.engine.states.shape
    rows = tuple(
        LayerRows(np.zeros((1, layer.key_bytes), np.uint8), np.zeros((1, layer.value_bytes), np.uint8))
        for layer in shape.layers
    )
    keys = (encode(KVBlock(Range(0, 1), rows), shape).tobytes(), data)
    frames = {
        "a mask of noise": [(decode_step(stage, top=3, masks=b"\xff" * 70), control), (state, data)],
        "a mask of another vocabulary": [
            (decode_step(stage, top=3, masks=pack_masks((0, 511), [np.arange(511) < 99])), control),
            (state, data),
        ],
        "a mask for more ranks": [
            (decode_step(stage, top=3, masks=pack_masks((0, 256, 512), [np.arange(512) < 99])), control),
            (state, data),
        ],
        "a mask of no token": [
            (decode_step(stage, top=3, masks=pack_masks((0, 512), [np.arange(600) == 599])), control),
            (state, data),
        ],
        "noise": [(bytes(range(200)), control)],
        "nothing": [(b"", control)],
        "data": [(step, data), (state, data)],
        "short states": [(step, control), (state[:-4], data)],
        "long states": [(step, control), (state * 2, data)],
        "states first": [(state, data), (step, control)],
        "another sequence": [(decode_step(stage, sequence=77), control), (state, data)],
        "no sequence": [(pack(Remove(300, 0, -1), stage.rows), control)],
        "keys of no sequence": [(pack(Read(300, 0, 1), stage.rows), control)],
        "keys of no positions": [(pack(Read(0, 5, 5), stage.rows), control)],
        "keys of all positions": [(pack(Write(0, 0, 2**31 - 1), stage.rows), control)],
        "keys written to no sequence": [(pack(Write(-1, 0, 1), stage.rows), control), keys],
        "keys kept of no sequence": [(pack(Keep(2, 0, (bytes(32),)), stage.rows), control)],
        "no": [(pack(Shift(0, 0, 0, 0), stage.rows)[:-1], control)],
    }[lie]
    error, _ = follow_all(stage, frames)
    assert isinstance(error, (ProtocolError, EngineError)), repr(error)
