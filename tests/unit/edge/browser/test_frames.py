"""Test frames between a bridge and a page."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.browser import frames
from edge.browser.frames import Splitter, pack, unpack
from transport.errors import ProtocolError

HEADERS = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20), max_size=5)


@given(sent=st.lists(st.tuples(HEADERS, st.binary(max_size=50)), max_size=6), data=st.data())
def test_frames_arrive_as_sent_however_the_stream_is_split(sent: list[tuple[dict, bytes]], data: st.DataObject) -> None:  # type: ignore[type-arg]
    stream = b"".join(pack(header, payload) for header, payload in sent)
    splitter, received, at = Splitter(), [], 0
    while at < len(stream):
        n = data.draw(st.integers(1, len(stream) - at))
        received += [(header, bytes(payload)) for header, payload in splitter.add(stream[at : at + n])]
        at += n
    assert received == sent
    assert splitter.is_empty


@given(sent=HEADERS, n=st.integers(1, 20))
def test_a_stream_that_ends_early_gives_no_frame(sent: dict[str, object], n: int) -> None:
    splitter, frame = Splitter(), pack(sent)
    assert splitter.add(frame[: max(1, len(frame) - n)]) == []
    assert not splitter.is_empty


@given(body=st.binary(max_size=60))
def test_any_bytes_are_a_frame_or_an_error(body: bytes) -> None:
    try:
        header, payload = unpack(body)
    except ProtocolError:
        return
    assert struct.unpack("<I", body[:4])[0] + 4 + len(payload) == len(body)
    assert isinstance(header, dict)


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 5000])
def test_a_header_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="header"):
        unpack(struct.pack("<I", len(text)) + text)


def test_a_frame_has_at_most_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack({"op": "chunk"}, b"12345")
    monkeypatch.setattr(frames, "MAX_FRAME", len(whole) - 4)
    assert pack({"op": "chunk"}, b"12345") == whole
    assert Splitter().add(whole) == [({"op": "chunk"}, b"12345")]
    with pytest.raises(ProtocolError, match="the maximum"):
        pack({"op": "chunk"}, b"123456")
    with pytest.raises(ProtocolError, match="the maximum"):
        Splitter().add(struct.pack("<I", len(whole) - 3))


def test_a_header_has_at_most_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"a": 1}, separators=(",", ":")).encode()
    monkeypatch.setattr(frames, "MAX_HEADER", len(text))
    assert unpack(pack({"a": 1})[4:]) == ({"a": 1}, b"")
    for refused in (lambda: pack({"a": 12}), lambda: unpack(struct.pack("<I", len(text) + 1) + text + b" ")):
        with pytest.raises(ProtocolError):
            refused()
