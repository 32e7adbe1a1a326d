"""Feeds damaged frames to everything that reads frames, and damaged recipes and tokens to what reads those.

    python tests/fuzz/fuzz_frames.py --frames 1000000 --seed 7

What comes out may be what the bytes say, or the error of that reader, at its deadline at the latest. Anything else, a
hang or memory that grows ends the program with a traceback. `feed` is the same for one input, for a fuzzer that
learns from coverage (fuzz_atheris.py) and for the inputs it kept (corpus/).
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import gc
import os
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from devices.errors import TrustError
from devices.trust.invitation import PREFIX, parse_token
from partition.slices.recipe import Copy, Literal, Recipe, RecipeError, Zeros
from tests.support import memory_link
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, TransportError
from transport.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    MAX_REASON,
    Kind,
    check_of,
    pack_header,
    parse_frame,
    parse_header,
)
from transport.link import CONTROL_BYTES, Deadlines
from transport.measure import answer
from transport.tcp_link import TcpLink

HANG_S = 30  # without one more frame
STEP_S = 0.02  # deadline of a receive that gets too little
SOON_S = 5.0  # never reached: all that comes is there, and then the end
LATE_S = 2.0  # how much later a wait may end on a busy machine
GROWTH_MIB = 8.0
FRAMES_PER_LINK = 40
_DEADLINES = Deadlines(step_timeout_s=STEP_S, send_timeout_s=STEP_S)
_HEADER = struct.Struct("<4sBBHII")
_EDGES = (0, 1, 15, 16, 17, 100, CONTROL_BYTES, CONTROL_BYTES + 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2**31, 2**32 - 1)

Chance = random.Random


def frame(payload: bytes, kind: int, sequence: int) -> bytes:
    """A good one."""
    return pack_header(kind, len(payload), sequence) + payload


def payload(chance: Chance) -> bytes:
    """Mostly short."""
    return chance.randbytes(chance.choice((0, 1, 3, 16, 33, 200, 200, 5000)))


def damaged(chance: Chance, good: bytes, sequence: int) -> bytes:
    """A frame that differs from a good one in one of the ways there are."""
    way = chance.randrange(9)
    data = bytearray(good)
    if way == 0:  # random bytes
        return chance.randbytes(chance.randrange(64))
    if way == 1:  # cut off
        return good[: chance.randrange(len(good))]
    if way == 2:  # more than announced
        return good + chance.randbytes(chance.randrange(1, 40))
    if way == 3:  # another length
        struct.pack_into("<I", data, 8, chance.choice(_EDGES))
    elif way == 4:  # another version
        data[4] = chance.randrange(256)
    elif way == 5:  # a frame that came before, or one too early
        struct.pack_into("<I", data, 12, (sequence + chance.choice((-2, -1, 1, 2, 2**31))) % 2**32)
    elif way == 6:  # a random header
        data[4:HEADER_BYTES] = chance.randbytes(HEADER_BYTES - 4)
    elif way == 7:  # some bits
        for _ in range(chance.randrange(1, 5)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    else:  # a piece twice, or left out
        at, n = chance.randrange(len(data)), chance.randrange(1, 20)
        data[at:at] = data[at : at + n] * chance.randrange(2)
        del data[at : at + n]
    if len(data) >= HEADER_BYTES and chance.random() < 0.5:  # or what is behind the check would never be reached
        struct.pack_into("<H", data, 6, check_of(data))
    return bytes(data)


def parse(data: bytes, sequence: int) -> str:
    """Through the parsers; how it ended."""
    try:
        header = parse_header(data, sequence)
        assert pack_header(*header) == data[:HEADER_BYTES]
        kind, body = parse_frame(memoryview(data), sequence)
    except ProtocolError:
        return "refused"
    assert frame(bytes(body), kind, sequence) == data
    return "ok"


class Wire:
    """A link and the other end of its socket; made anew when the link is broken."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._open()

    def _open(self) -> None:
        if self._chance.random() < 0.05:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._far = socket.create_connection(listener.getsockname())
                near = listener.accept()[0]
            # No connection may wait for its last packets: there would be tens of thousands of them.
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            near, self._far = socket.socketpair()
        self._link = TcpLink(near, "the fuzzer", _DEADLINES, poll_s=0)
        self._frames = 0

    def renew(self) -> None:
        """Another link."""
        self.close()
        self._open()

    def close(self) -> None:
        """End both."""
        self._link.close()
        self._far.close()

    def good(self, body: bytes, kind: Kind) -> str:
        """A good frame, which must arrive."""
        self._far.sendall(frame(body, kind, self._frames))
        self._frames += 1
        if self._chance.randrange(2) and kind is Kind.DATA:
            into = bytearray(len(body))
            self._link.receive_into(into, SOON_S)
            assert into == body
        else:
            result = self._link.receive(SOON_S)
            assert (result.kind, result.payload) == (kind, body)
        if self._frames > FRAMES_PER_LINK:
            self.renew()
        return "ok"

    def bad(self, body: bytes, kind: Kind) -> str:
        """A damaged one, and whatever comes of it: the bytes may also begin a good frame, or be one."""
        chance, link = self._chance, self._link
        sent = damaged(chance, frame(body, kind, self._frames), self._frames)
        self._far.sendall(sent)
        # Mostly the stream ends then; a few wait for their deadline.
        open_ = chance.randrange(2000) == 0
        if not open_:
            self._far.shutdown(socket.SHUT_WR)
        timeout_s = STEP_S if open_ else SOON_S
        into = chance.choice((None, None, len(body), chance.randrange(6000)))
        rest = sent
        while True:
            sequence = link._received.sequence
            began = time.monotonic()
            try:
                if into is None:
                    what, came = link.receive(timeout_s)
                else:
                    came, what = bytearray(into), Kind.DATA
                    link.receive_into(came, timeout_s)
            except TransportError as error:
                outcome = type(error)
                break
            whole = frame(bytes(came), what, sequence)
            assert rest.startswith(whole)
            rest = rest[len(whole) :]
        assert time.monotonic() - began < timeout_s + LATE_S
        assert open_ or outcome is not LinkTimeout
        self.renew()
        return {ProtocolError: "refused", LinkClosed: "closed"}.get(outcome, outcome.__name__)


def recipe(data: bytes) -> str:
    """Through the parser of recipes."""
    try:
        result = Recipe.from_bytes(data)
    except RecipeError:
        return "refused"
    assert result.to_bytes() == data
    return "ok"


def token(text: str) -> str:
    """Through the parser of tokens."""
    try:
        parse_token(text)
    except TrustError:
        return "refused"
    return "ok"


def a_recipe(chance: Chance) -> bytes:
    """A good one."""
    segments = [
        chance.choice(
            (Literal(b"header"), Zeros(chance.randrange(1, 99)), Copy(3, 5), Copy(1, 2, 7, chance.randrange(1, 9)))
        )
        for _ in range(chance.randrange(1, 6))
    ]
    return Recipe(sha256(b"model").hexdigest(), 1000, tuple(segments)).to_bytes()


def mutated(chance: Chance, good: bytes) -> bytes:
    """Some bytes changed, left out, added, or all cut off."""
    data = bytearray(good)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        way = chance.randrange(4)
        if way == 0:
            data[at : at + 1] = chance.randbytes(1)
        elif way == 1:
            del data[at : at + chance.randrange(9)]
        elif way == 2:
            data[at:at] = chance.randbytes(chance.randrange(9))
        else:
            data[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 2**32, 2**63, 2**64 - 1)))
    return bytes(data)


def sealed(body: bytes) -> str:
    """A token with a checksum that fits."""
    return PREFIX + base64.urlsafe_b64encode(body + sha256(body).digest()[:4]).rstrip(b"=").decode()


def opened(text: str) -> bytes:
    """Return the content of a token, without its checksum."""
    return base64.urlsafe_b64decode(text[len(PREFIX) :] + "==")[:-4]


def good_token() -> str:
    """Return a valid token of a cluster made for it."""
    from tests.support.trust import HOUR_S, Cluster

    with tempfile.TemporaryDirectory() as folder:
        return Cluster(Path(folder), time.time()).authority.invite("fuzzed", HOUR_S, time.time())


# One input at a time, for fuzzers that learn.


def feed(data: bytes) -> bool:
    """The first byte says to which reader the others go. Whether they took all of it."""
    if not data:
        return False
    which, rest = data[0] % 6, data[1:]
    if which == 0:
        return parse(rest, int.from_bytes(rest[12:16], "little") if len(rest) > 15 else 0) == "ok"
    if which == 1:
        return _feed_stream(rest, lambda link: link.receive(SOON_S))
    if which == 2:
        return _feed_stream(rest, lambda link: link.receive_into(bytearray(rest[0] if rest else 0), SOON_S))
    if which == 3:
        return recipe(rest) == "ok"
    if which == 4:
        return token(rest.decode("latin-1") if rest[:1] == b"e" else sealed(rest)) == "ok"
    return _feed_answer(rest)


def _feed_stream(data: bytes, call: Callable[[TcpLink], object]) -> bool:
    """All frames of a stream of bytes, until it ends; whether that was where a frame ends."""
    near, far = socket.socketpair()
    with far, TcpLink(near, "the fuzzer", _DEADLINES, poll_s=0) as link:
        far.sendall(data[: 64 << 10])
        far.close()
        try:
            while True:
                call(link)
        except LinkTimeout:
            raise
        except TransportError as error:
            return isinstance(error, LinkClosed)


def _feed_answer(data: bytes) -> bool:
    """To the end that answers measurements: frames with a good header around any content."""
    near, far = memory_link.pair(deadlines=_DEADLINES)
    while data:
        kind, n, data = Kind(1 + data[0] % 8), data[0] >> 3, data[1:]
        # Up to 255 blocks are asked for, or far too many; nobody reads them here.
        body = data[:2] + b"\0\0" + data[2:3] if n == 5 else data[:n]
        try:
            far.send(body[:MAX_REASON], kind)
        except TransportError:
            break
        data = data[n:]
    far.close()
    try:
        answer(near)
    except TransportError:
        near.close()
        return False
    return True


# Many inputs.


def rss_mib() -> float:
    """Memory of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(frames: int, seed: int) -> str:
    """Feed so many; the summary."""
    chance = random.Random(seed)
    wire = Wire(chance)
    good = good_token()
    inside = opened(good)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in ("parse", "link", "recipe", "token")}
    began, early_mib = time.monotonic(), 0.0
    for i in range(frames):
        if i % 1000 == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        if i == frames // 10:
            early_mib = rss_mib()
        share, sequence = chance.random(), chance.choice((0, 1, 2**31, 2**32 - 1))
        kind = Kind(chance.randrange(1, 9))
        ordinary = kind if kind not in (Kind.ERROR, Kind.CLOSE) else Kind.DATA
        if share < 0.6:
            data = frame(payload(chance), kind, sequence)
            outcome = parse(data if chance.random() < 0.2 else damaged(chance, data, sequence), sequence)
            outcomes["parse"][outcome] += 1
        elif share < 0.9:
            body = payload(chance)
            outcome = wire.good(body, ordinary) if chance.random() < 0.5 else wire.bad(body, kind)
            outcomes["link"][outcome] += 1
        elif share < 0.99:
            outcomes["recipe"][recipe(mutated(chance, a_recipe(chance)))] += 1
        else:
            malice = chance.random() < 0.5
            text = sealed(mutated(chance, inside)) if malice else mutated(chance, good.encode()).decode("latin-1")
            outcomes["token"][token(text)] += 1
    faulthandler.cancel_dump_traceback_later()
    wire.close()
    took, late_mib = time.monotonic() - began, rss_mib()
    assert frames < 10_000 or late_mib - early_mib < GROWTH_MIB, f"memory grew from {early_mib} to {late_mib} MiB"
    parts = "; ".join(
        f"{name} {sum(result.values()):,} ({', '.join(f'{n:,} {what}' for what, n in sorted(result.items()))})"
        for name, result in outcomes.items()
    )
    return (
        f"{frames:,} frames in {took:.1f} s ({frames / took:,.0f}/s), seed {seed}: {parts}; 0 unexpected;"
        f" memory {early_mib:.1f} MiB after a tenth, {late_mib:.1f} MiB at the end"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Feed damaged frames to everything that reads frames.")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(run(args.frames, args.seed))


if __name__ == "__main__":
    main()
