"""Damaged inputs that strangers may send: files of models, frames, states of sequences, messages of owners and workers.

Each kind makes an input from chance alone, and feeds one to what reads it. An input is accepted, or refused with an
error that a person can act on. Anything else is a finding.
"""

from __future__ import annotations

import math
import random
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import EdgeError
from partition.slices.recipe import Literal, Recipe, Zeros
from tests.fuzz import fuzz_frames

NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip


class Kind(ABC):
    """One kind of input."""

    @abstractmethod
    def make(self, chance: random.Random) -> bytes:
        """An input; the same for the same chance."""

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Give it to its readers. EdgeError where they refuse it."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what it holds."""


def mutated(chance: random.Random, good: bytes, most: int = 3) -> bytes:
    """Some bits or numbers changed, pieces left out, doubled or exchanged, or the end cut off."""
    data = bytearray(good)
    for _ in range(chance.randrange(1, most + 1)):
        if not data:
            break
        at, n = chance.randrange(len(data)), chance.choice((1, 2, 4, 8, 16, 40))
        match chance.randrange(8):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS) & 0xFFFFFFFF)
            case 3:
                data[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
            case 4:
                del data[at : at + n]
            case 5:
                data[at:at] = data[at : at + n]
            case 6:
                to = chance.randrange(len(data))
                data[at : at + n], data[to : to + n] = data[to : to + n], data[at : at + n]
            case 7 if chance.random() < 0.3:
                del data[at:]
            case _:
                data[at:at] = chance.randbytes(n)
    return bytes(data)


class GgufFiles(Kind):
    """Headers of GGUF files, with as much behind them as they say."""

    def __init__(self, folder: Path) -> None:
        from tests.unit.quant import test_bad_files

        self._cases, self._path = test_bad_files, folder / "model.gguf"
        self._bases = [test_bad_files.base(name, "q8_0") for name in test_bad_files.ARCHITECTURES]
        self._good = [base.encode() for base in self._bases]

    def make(self, chance: random.Random) -> bytes:
        which = chance.randrange(len(self._bases))
        if chance.random() < 0.8:
            header, weights = self._good[which]
            # Most of a header is its vocabulary; what is before it and behind it matters as much.
            at, n = chance.randrange(len(header)), 400
            start = chance.choice((0, max(0, len(header) - n - 1500), at))
            changed = header[:start] + mutated(chance, header[start : start + n]) + header[start + n :]
            return changed + bytes(len(weights) if chance.random() < 0.9 else 0)
        base = self._bases[which]
        file = type(base)(dict(base.pairs), dict(base.tensors))
        for _ in range(chance.randrange(1, 3)):
            with suppress(ValueError, LookupError):  # what was to be changed is gone already
                chance.choice(self._cases.CHANGES)(file, chance)
        return b"".join(file.encode())

    def feed(self, data: bytes) -> None:
        from partition.model.check import check_loadable
        from partition.model.model import ModelShape
        from partition.slices.gguf_slice import limits
        from quant.gguf.file import GgufFile

        self._path.write_bytes(data)
        file = GgufFile.open(self._path)
        check_loadable(file)
        ModelShape.from_gguf(file)
        limits(file)


class OnnxFiles(Kind):
    """Networks in ONNX, through the checks and the graph that plans are made from."""

    def __init__(self, folder: Path) -> None:
        from tests.support.onnx_graphs import conv_net, mlp
        from tests.support.onnx_tiny import counting

        self._path, self._model = folder / "model.onnx", type(mlp())
        small = [mlp(), conv_net()]
        for model in small:  # weights are most of the bytes, and mean nothing here
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) > 4096:
                    tensor.ClearField("raw_data")
                    tensor.dims[:] = [1] * len(tensor.dims)
                    tensor.raw_data = bytes(4)
        self._good = [counting(), *(bytes(model.SerializeToString()) for model in small)]

    def make(self, chance: random.Random) -> bytes:
        good = chance.choice(self._good)
        if chance.random() < 0.3:
            return mutated(chance, good)
        model = self._model.FromString(good)
        for _ in range(chance.randrange(1, 4)):
            varied(model, chance)
        return bytes(model.SerializeToString())

    def feed(self, data: bytes) -> None:
        from edge.onnx.file import load
        from edge.onnx.model import OnnxSource, declared_inputs
        from partition.plan.onnx_cuts import labels

        self._path.write_bytes(data)
        file = load(self._path)
        declared_inputs(file)
        labels(OnnxSource.from_file(file, {"batch": 2} if b"batch" in data else {}).graph)


class Frames(Kind):
    """Frames, alone and in streams, recipes, tokens, and answers to measurements."""

    def make(self, chance: random.Random) -> bytes:
        which = chance.randrange(6)
        if which in (1, 2):
            stream = b""
            for sequence in range(chance.randrange(1, 4)):
                kind = chance.choice(tuple(fuzz_frames.Kind))
                good = fuzz_frames.frame(fuzz_frames.payload(chance), kind, sequence)
                stream += fuzz_frames.damaged(chance, good, sequence) if chance.random() < 0.4 else good
            return bytes([which]) + stream
        if which == 3:
            return bytes([which]) + fuzz_frames.mutated(chance, fuzz_frames.a_recipe(chance))
        if which == 0:
            kind, sequence = chance.choice(tuple(fuzz_frames.Kind)), chance.choice((0, 1, (1 << 32) - 1))
            good = fuzz_frames.frame(fuzz_frames.payload(chance), kind, sequence)
            return bytes([which]) + fuzz_frames.damaged(chance, good, sequence)
        return bytes([which]) + chance.randbytes(chance.randrange(200))

    def feed(self, data: bytes) -> None:
        if not fuzz_frames.feed(data):
            raise EdgeError("refused")


class States(Kind):
    """Keys and values of sequences. What is accepted differs in keys and values only."""

    def __init__(self) -> None:
        from partition.plan.plan import Range
        from partition.state.sequence import encode
        from partition.state.shape import LayerShape, StateShape
        from quant.types import TYPES
        from tests.unit.partition import test_state

        self._tests = test_state
        q8, f16 = TYPES["q8_0"], TYPES["f16"]
        self._cases = []
        for kv, caches, tokens, transposed in (
            (f16, 1, 3, False), (f16, 2, 2, True), (q8, 2, 4, False), (f16, 1, 1, True),
        ):  # fmt: skip
            size = kv.block_bytes
            layers = tuple(
                LayerShape(i, (0, 1), 2 * size, (i + 1) * 2 * size, caches == 2 and i == 1) for i in range(3)
            )
            shape = StateShape(layers, kv.id, kv.id, size if kv.block == 1 else 0, caches)
            block = test_state.block_of(shape, Range(5, 5 + tokens))
            good = bytes(encode(block, shape, transposed=transposed))
            sound = test_state.header(good, shape, tokens, transposed=transposed)
            self._cases.append((shape, block.positions, good, sound, transposed))

    def make(self, chance: random.Random) -> bytes:
        which = chance.randrange(len(self._cases))
        return bytes([which]) + self._tests.mutated(self._cases[which][2], chance)

    def feed(self, data: bytes) -> None:
        from partition.state.sequence import check_encoded, decode, encode

        shape, positions, good, sound, transposed = self._cases[data[0] % len(self._cases)]
        state = data[1:]
        with suppress(EdgeError):
            check_encoded(state, shape, positions)
            assert np.array_equal(encode(decode(state, shape, positions), shape), np.frombuffer(state, np.uint8))
        decode(state, shape, positions)
        assert len(state) == len(good)
        assert self._tests.header(state, shape, len(positions), transposed=transposed) == sound


class Messages(Kind):
    """Messages between owners and workers: the daemon's calls, an engine process's commands, and their answers."""

    def __init__(self, folder: Path) -> None:
        from edge.models.digests import Digests
        from edge.models.slice_store import SliceStore
        from edge.worker.limits import WorkerOptions
        from edge.worker.service import Worker
        from tests.support import trust
        from transport import edge_pb2 as pb
        from transport.connection_limit import ConnectionLimiter

        self._pb, self._folder = pb, folder
        for name in ("slices", "state", "rank"):
            (folder / name).mkdir()
        (folder / "nothing").write_bytes(b"no model")
        member = folder / "cluster" / "pi"
        trust.Cluster(folder / "cluster", time.time()).joined("pi")
        options = WorkerOptions("fuzzed", "127.0.0.1", 1, None, None, member)
        store, digests = SliceStore(folder / "slices", 1 << 20), Digests(folder / "state")
        self._worker = Worker(options, store, digests, ConnectionLimiter(64))
        self._good = self._messages()
        self._rank = self._opened()

    def _opened(self) -> Any:
        """A rank of three that no other one has reached."""
        from edge.net.peers import SECRET_BYTES
        from edge.worker.limits import ResourceLimits
        from edge.worker.rank import Rank
        from transport.tcp_link import TcpLink

        ours, theirs = socket.socketpair()
        theirs.close()
        opened = self._pb.Open(rank=1, world_size=3, secret=bytes(SECRET_BYTES))
        self._control = TcpLink(ours, "the daemon", poll_s=0)
        return Rank(self._control, opened, "127.0.0.1", self._folder / "rank", None, ResourceLimits(1))

    def close(self) -> None:
        self._worker.sessions.close()
        self._rank._listener.close()
        self._control.close()

    def _messages(self) -> list[Any]:
        """Good ones, of each type that is read."""
        from devices.profile import DeviceProfile
        from edge.worker.messages import options_message, profile_message
        from tests.conftest import OPTIONS

        pb = self._pb
        profile = DeviceProfile("pi", "Linux 6", "aarch64", "a cpu", 4, 4, 4, 4.0, 1 << 32, 1 << 31,
                                None, None, 90.0, True, 50.0, "3.11.2", "0.1.0", "0.3.36", "0" * 16)  # fmt: skip
        tensor = pb.Tensor(name="x", type="float32", shape=[1, 3], open=[0])
        boundary = pb.Boundary(tensors=[tensor], inner=True, passed=1)
        load = pb.Load(slice="0" * 64, options=options_message(OPTIONS), stages=[1, 2], prefix_key=bytes(32))
        peers = [
            pb.Peer(rank=rank, name="a", host="h", port=1, tcp_port=2, session="s", addresses=["10.0.0.1"])
            for rank in (0, 3)
        ]
        link = pb.LinkState(rank=2, kind="tcp", round_trip_s=1e-3, why="as measured")
        recipe = Recipe(sha256(b"model").hexdigest(), 1000, (Literal(b"header"), Zeros(30)))
        crl = b"-----BEGIN X509 CRL-----\n" + b"MIIBITCByAIBATAKBggqhkjOPQQDAjAS" * 4 + b"\n-----END X509 CRL-----\n"
        return [
            pb.Command(load=load),
            pb.Command(load=pb.Load(slice="0" * 64, stage=pb.Stage(takes=boundary, gives=boundary, threads=1))),
            pb.Command(connect=pb.Connect(peers=peers, transport="auto")),
            pb.Command(measure=pb.Measure(rank=0, seconds=1.0)),
            pb.Command(allreduce=pb.Allreduce(n_floats=100, algorithm="split", wire="f32", repeats=1)),
            pb.Command(run=pb.Run(wire="f32", algorithm="auto")),
            pb.Command(time=pb.Time(rows=[1, 8], steps=3, depth=10)),
            pb.Command(answer=pb.Answer(rank=0)),
            pb.SliceOffer(slice=sha256(b"header" + bytes(30)).hexdigest(), n_bytes=36, recipe=recipe.to_bytes()),
            pb.SliceOffer(slice="0" * 64, n_bytes=100),
            pb.RevokedList(crl_pem=crl),
            pb.Certificate(certificate_pem=crl),
            pb.Description(profile=profile_message(profile), protocol=1, clock_s=1e9),
            pb.Event(connected=pb.Connected(links=[link])),
        ]

    def make(self, chance: random.Random) -> bytes:
        which = chance.randrange(len(self._good))
        good = self._good[which]
        message = type(good).FromString(good.SerializeToString())
        for _ in range(chance.randrange(4)):
            varied(message, chance)
        data = bytes(message.SerializeToString())
        return bytes([which]) + (mutated(chance, data) if data and chance.random() < 0.3 else data)

    def feed(self, data: bytes) -> None:
        from google.protobuf.message import DecodeError

        kind = type(self._good[data[0] % len(self._good)])
        try:
            message = kind.FromString(data[1:])
        except DecodeError:
            raise EdgeError("no message") from None
        try:
            self._take(message)
        except (OSError, ValueError) as error:  # what `edge.worker.rank.failed` and the daemon tell in words
            raise EdgeError(str(error)) from error

    def _take(self, message: Any) -> None:
        from edge.cluster.rank_group import _state
        from edge.worker.messages import profile_from

        pb, context = self._pb, _Context()
        if isinstance(message, pb.Command):
            self._command(message)
        elif isinstance(message, pb.SliceOffer):
            next(self._worker.Offer(message, context))
        elif isinstance(message, pb.RevokedList):
            self._worker.UpdateRevoked(message, context)
        elif isinstance(message, pb.Certificate):
            self._worker.Install(message, context)
        elif isinstance(message, pb.Description):
            profile_from(message.profile)
        else:
            for link in message.connected.links:
                _state(1, link)

    def _command(self, command: Any) -> None:
        from edge.llm.resolve import resolve
        from edge.worker.messages import options_from

        name = command.WhichOneof("command")
        if name == "connect" and {peer.rank for peer in command.connect.peers} == {0, 2}:
            raise EdgeError("there is nobody to dial")
        if name == "load":
            command.load.path = str(self._folder / "nothing")  # as the daemon fills it in
            options = options_from(command.load.options)
            context, _ = resolve(options, _SHAPE)
            options.check_sequences(min(options.rows, context))
        self._rank.handle(command)


class _Shape:
    context_length, n_embd = 4096, 64


_SHAPE: Any = _Shape()


class _Context:
    """A call that nobody ends."""

    def is_active(self) -> bool:
        return True


def varied(message: Any, chance: random.Random) -> None:
    """Change one field of a message, or of one inside it: another value, none, or one more."""
    message = chance.choice([message, *_inside(message)])
    if not message.DESCRIPTOR.fields:
        return
    provided = [field for field, _ in message.ListFields()]
    field = chance.choice(provided if provided and chance.random() < 0.8 else list(message.DESCRIPTOR.fields))
    value = getattr(message, field.name)
    if chance.random() < 0.15:
        message.ClearField(field.name)
    elif isinstance(value, (bool, int, float, str, bytes)):
        setattr(message, field.name, _value(field, chance))
    elif hasattr(value, "ListFields"):
        value.SetInParent()
    elif len(value) and chance.random() < 0.4:
        value.pop(chance.randrange(len(value)))
    elif field.message_type is None:
        value.append(_value(field, chance))
    elif len(value):
        value.add().CopyFrom(chance.choice(value))
    else:
        value.add()


def _inside(message: Any) -> Iterator[Any]:
    """All messages in a message."""
    for _, value in message.ListFields():
        if isinstance(value, (bool, int, float, str, bytes)):
            continue
        for item in [value] if hasattr(value, "ListFields") else value:
            if hasattr(item, "ListFields"):
                yield item
                yield from _inside(item)


def _value(field: Any, chance: random.Random) -> Any:
    kinds = type(field)
    match field.cpp_type:
        case kinds.CPPTYPE_STRING:
            text = chance.choice(WORDS) * chance.choice((1, 1, 1, 50))
            return text.encode() + chance.randbytes(chance.randrange(40)) if field.type == kinds.TYPE_BYTES else text
        case kinds.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case kinds.CPPTYPE_DOUBLE | kinds.CPPTYPE_FLOAT:
            return chance.choice((0.0, 1.0, -1.0, 1e-9, 1e300, math.nan, math.inf, chance.random()))
        case kinds.CPPTYPE_ENUM:
            return chance.choice(field.enum_type.values).number
        case kinds.CPPTYPE_INT32 | kinds.CPPTYPE_INT64:
            bits = 31 if field.cpp_type == kinds.CPPTYPE_INT32 else 63
            return chance.choice((-1, -(1 << bits), *(n for n in NUMBERS if n < 1 << bits)))
        case _:
            bits = 32 if field.cpp_type == kinds.CPPTYPE_UINT32 else 64
            return chance.choice([n for n in NUMBERS if n < 1 << bits])


WORDS: Sequence[str] = ("", "x", "f32", "q8_0", "auto", "tcp", "grpc", "float32", "int64", "..", "/etc/passwd", "a\nb",
                        "\u202e", "f16", "split", "CPUExecutionProvider", "on", "0" * 64)  # fmt: skip

KINDS = {
    "gguf": GgufFiles,
    "onnx": OnnxFiles,
    "frames": lambda folder: Frames(),
    "states": lambda folder: States(),
    "messages": Messages,
}
