"""Bytes between devices, recorded for each version of the protocol in tests/data/wire.

Where a format changes, raise VERSION in transport/frame.py and run `python -m tests.support.wire_bytes`: it records the
bytes of the new version beside those of the old ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

import numpy as np

from edge.llama.llama import Batch
from edge.llm.options import EngineOptions
from edge.net.peers import HELLO, SECRET_BYTES
from edge.onnx.wire import Boundary, Item, Receiver, Tensor, send
from edge.onnx.wire import Op as ItemOp
from edge.parallel.masks import pack as pack_masks
from edge.parallel.steps import Decode, Keep, pack
from edge.worker import draft_queries
from edge.worker.draft_queries import DraftQuery
from edge.worker.messages import options_message, stage_message
from partition.plan.onnx_plan import OnnxStage
from partition.plan.plan import Range
from quant.wire import Q8
from tests.support import ROOT
from tests.support.memory_link import pair
from transport import edge_pb2 as pb
from transport.frame import VERSION, Kind, pack_header
from transport.link import Link

FOLDER = ROOT / "tests" / "data" / "wire"
SECRET = bytes(range(SECRET_BYTES))
DECODE = Decode(2, 1, 40, fresh=False)
MASKS = pack_masks((0, 40), [np.arange(40) % 3 == 0])
MASKED = DECODE._replace(top=7, masks=MASKS)
KEEP = Keep(3, 64, (b"\x11" * 32, b"\x22" * 32))
DRAFT_QUERY = DraftQuery(300, 7, (5, 31999))
BOUNDARY = Boundary((Tensor("hidden", "float32", (1, 3), (0,)), Tensor("mask", "int64", (2,))), inner=True, passed=2)
ITEM = Item(ItemOp.RUN, 7, "f16", (0.25, 0.5))
TENSORS = {"hidden": np.array([[1.0, -2.0, 0.5]], np.float32), "mask": np.array([1, 0], np.int64)}
FLOATS = np.linspace(-4, 3, 35, dtype=np.float32)  # a block, and a part of one
OPEN = pb.Command(
    open=pb.Open(
        rank=1, world_size=3, secret=SECRET, connect_timeout_s=5, step_timeout_s=30, send_timeout_s=20,
        affinity=(0, 2), streams=True,
    )
)  # fmt: skip
LOAD = pb.Command(
    load=pb.Load(
        slice="ab" * 32,
        stages=(2, 1),
        options=options_message(EngineOptions(context=512, batch=64, threads=2, kv_type="f16")),
        stage=stage_message(OnnxStage("pi", Range(0, 4), threads=2, provider="cpu"), BOUNDARY, BOUNDARY),
        prefix_key=bytes(range(32)),
    )
)


def rows() -> Batch:
    """The rows of DECODE."""
    batch = Batch(4)
    batch.positions[:2], batch.sequences[:2], batch.outputs[:2] = (8, 9), (0, 3), (0, 1)
    return batch


def sent(send_on: Callable[[Link], None]) -> bytes:
    """Return what goes over a link, frame behind frame."""
    near, far = pair()
    send_on(near)
    return b"".join(far._incoming.frames)


def on_link(data: bytes) -> Link:
    """A link on which these frames lie ready."""
    near, far = pair()
    while data:
        end = 16 + int.from_bytes(data[8:12], "little")
        near._outgoing.frames.append(data[:end])
        data = data[end:]
    return far


def encoded(x: np.ndarray) -> bytes:
    """Floats in the wire type q8."""
    wire = Q8()
    data = np.empty(wire.n_bytes(x.size), np.uint8)
    wire.encode(x, data)
    return data.tobytes()


def item_on(link: Link) -> tuple[Item, dict[str, np.ndarray]]:
    """The item that comes next, with its tensors."""
    receiver, tensors = Receiver(link, BOUNDARY), {}
    item, shapes = receiver.item(1.0)
    receiver.tensors(item, shapes, tensors)
    return item, tensors


def bytes_now() -> Mapping[str, bytes]:
    """Return what this tree sends, by name."""
    return {
        "header": pack_header(Kind.DATA, 8192, 4711),
        "hello": sent(lambda link: link.send(HELLO.pack(SECRET, 0, 2), Kind.HELLO)),
        "decode step": sent(lambda link: link.send(pack(DECODE, rows()), Kind.CONTROL)),
        "masked step": sent(lambda link: link.send(pack(MASKED, rows()), Kind.CONTROL)),
        "keep step": pack(KEEP, rows()),
        "onnx item": sent(lambda link: send(link, BOUNDARY, ITEM, TENSORS)),
        "q8 floats": encoded(FLOATS),
        "guess": sent(lambda link: link.send(draft_queries.pack(DRAFT_QUERY), Kind.CONTROL)),
        "open": OPEN.SerializeToString(deterministic=True),
        "load": LOAD.SerializeToString(deterministic=True),
    }


def recorded(version: int = VERSION) -> Mapping[str, bytes]:
    """Return what that version sent, by name. FileNotFoundError where nothing was recorded of it."""
    texts: dict[str, str] = json.loads((FOLDER / f"version-{version}.json").read_text())
    return {name: bytes.fromhex(text) for name, text in texts.items()}


def record() -> None:
    """Keep the bytes of this version. FileExistsError where it has some: they are what devices out there send."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"version-{VERSION}.json").open("x") as file:
        file.write(json.dumps({name: data.hex() for name, data in bytes_now().items()}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        record()
    except FileExistsError as error:
        sys.exit(f"{error.filename} is there: raise VERSION in transport/frame.py where a format changed")
