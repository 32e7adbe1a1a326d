"""Test frames: their bytes; and each received frame is the sent one, or is refused with the name of the wrong field."""

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import fuzz_frames
from tests.support import ROOT
from tests.support.links import checked, frame
from transport.errors import ProtocolError
from transport.frame import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    VERSION,
    Header,
    Kind,
    pack_header,
    parse_frame,
    parse_header,
)

SEQUENCES = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(Kind)


def test_a_header_is_16_bytes_laid_out_as_documented() -> None:
    assert pack_header(Kind.DATA, 0x01020304, 0x0A0B0C0D) == b"EDGE\x05\x01,\x04\x04\x03\x02\x01\x0d\x0c\x0b\x0a"
    assert pack_header(Kind.SHAPED, MAX_PAYLOAD, 2**32 - 1) == b"EDGE\x05\x08\x90\x11\0\0\0\x04\xff\xff\xff\xff"
    assert [int(kind) for kind in Kind] == list(range(1, 9))  # numbers on the wire never change their meaning
    assert (HEADER_BYTES, VERSION, MAX_PAYLOAD) == (16, 5, 64 * 1024 * 1024)


@pytest.mark.parametrize(
    ("at", "field", "why"),
    [
        (0, b"edge", "a frame starts with b'EDGE', got b'edge'"),
        (0, b"HTTP", "not our protocol"),
        (4, b"\x01", "the peer speaks version 1 of the protocol, this is version 5; update both"),
        (4, b"\x00", "version 0"),
        (5, b"\x00", "frames of kind 0"),
        (5, b"\x0b", "frames of kind 11"),
        (8, struct.pack("<I", MAX_PAYLOAD + 1), "a frame of 67108865 bytes was announced, at most 67108864"),
        (8, b"\xff\xff\xff\xff", "4294967295 bytes was announced"),
        (8, struct.pack("<I", 4), "announced 4 bytes, got 3"),
        (8, struct.pack("<I", 2), "announced 2 bytes, got 3"),
        (12, struct.pack("<I", 6), "expected frame 7, got frame 6: frames were lost or repeated"),
        (12, struct.pack("<I", 8), "expected frame 7, got frame 8"),
    ],
)
def test_every_wrong_field_is_refused_and_named(at: int, field: bytes, why: str) -> None:
    data = bytearray(frame(b"abc", sequence=7))
    parse_frame(memoryview(data), 7)
    data[at : at + len(field)] = field
    data = bytearray(checked(data))
    with pytest.raises(ProtocolError, match=why):
        parse_frame(memoryview(data), 7)


@given(KINDS, st.integers(0, MAX_PAYLOAD), SEQUENCES, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_bit_that_changes_in_a_header_is_noticed(kind: Kind, length: int, sequence: int, bit: int) -> None:
    """A length that is believed to be larger would be waited for until the deadline."""
    data = bytearray(pack_header(kind, length, sequence))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=r"its checksum is wrong|a frame starts with|speaks version"):
        parse_header(data, sequence)


@pytest.mark.parametrize("n", range(HEADER_BYTES))
def test_a_header_that_is_cut_off_is_refused(n: int) -> None:
    for parse in (parse_frame, parse_header):
        with pytest.raises(ProtocolError, match=f"a frame of {n} bytes was cut off inside its header of 16"):
            parse(memoryview(frame()[:n]), 0)


def test_a_payload_larger_than_a_frame_is_not_packed() -> None:
    with pytest.raises(ProtocolError, match="at most 67108864 bytes, got 67108865; send it in parts"):
        pack_header(Kind.DATA, MAX_PAYLOAD + 1, 0)


def test_nothing_is_reserved_for_a_length_that_is_announced() -> None:
    data = memoryview(pack_header(Kind.DATA, MAX_PAYLOAD, 0))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="announced 67108864 bytes, got 0"):
            parse_frame(data, 0)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(KINDS, st.binary(max_size=200), SEQUENCES)
def test_what_is_packed_is_parsed(kind: Kind, payload: bytes, sequence: int) -> None:
    data = frame(payload, kind, sequence)
    assert parse_header(data, sequence) == Header(kind, len(payload), sequence)
    parsed = parse_frame(memoryview(data), sequence)
    assert (parsed.kind, bytes(parsed.payload)) == (kind, payload)


def parses_or_refuses(data: bytes, sequence: int) -> None:
    """Any bytes: refused, or exactly the frame that packs to them."""
    try:
        kind, payload = parse_frame(memoryview(data), sequence)
    except ProtocolError:
        pass
    else:
        assert frame(bytes(payload), kind, sequence) == data
    try:
        header = parse_header(data, sequence)
    except ProtocolError:
        return
    assert pack_header(*header) == data[:HEADER_BYTES]


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda rest: b"EDGE\x05\x01\0\0" + rest), SEQUENCES)
@example(b"", 0)
@example(b"EDGE", 0)
def test_any_bytes_are_a_frame_or_refused(data: bytes, sequence: int) -> None:
    parses_or_refuses(data, sequence)


@given(KINDS, st.binary(max_size=60), SEQUENCES, st.data())
def test_a_damaged_frame_is_a_frame_or_refused(kind: Kind, payload: bytes, sequence: int, data: st.DataObject) -> None:
    damaged = bytearray(frame(payload, kind, sequence))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["change", "insert", "remove", "cut"])):
            case "change":
                damaged[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "insert":
                damaged[at:at] = data.draw(st.binary(max_size=8))
            case "remove":
                del damaged[at : at + 4]
            case "cut":
                del damaged[at:]
    parses_or_refuses(bytes(damaged), sequence)


# Fuzzing. `python tests/fuzz/fuzz_frames.py` and `python tests/fuzz/fuzz_atheris.py` go on as long as one likes.


def test_the_fuzzer_finds_nothing_in_a_few_rounds() -> None:
    done = subprocess.run(
        [sys.executable, "tests/fuzz/fuzz_frames.py", "--frames", "4000", "--seed", "1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4,000 frames" in done.stdout
    assert "0 unexpected" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "corpus").glob("*-*")), ids=lambda path: path.name)
def test_inputs_that_were_of_interest_to_the_fuzzer(path: Path) -> None:
    fuzz_frames.feed(path.read_bytes())
