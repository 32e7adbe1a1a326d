"""The encoder's process: what it takes, what it refuses, and that a hostile file costs an error and nothing more."""

import io
import os
import signal
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge.errors import EngineError, MediaError
from edge.media import decoding
from edge.media.encoder import MediaEncoder, RawMedia
from edge.media.media import EmbeddingRows, embeddings_of, rows_from
from edge.media.prompt import encoded as encoded_files
from tests.support import projectors
from tests.support.helpers import TIMEOUT_S, until
from tests.support.multimodal import encoded, open_projector, pixels, png, wav
from tests.support.workers import gone


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("projectors")
    return {kind: projectors.write(kind, folder) for kind in projectors.KINDS}


@pytest.fixture(scope="module")
def pictures(files: dict[str, tuple[Path, Path]]) -> Iterator[MediaEncoder]:
    with MediaEncoder(*files["mrope"]) as encoder:
        yield encoder


@pytest.mark.parametrize("kind", projectors.KINDS)
def test_rows_are_those_of_the_projector_in_this_process(kind: str, files: dict[str, tuple[Path, Path]]) -> None:
    native, model = open_projector(*files[kind])
    with closing(native), closing(model), MediaEncoder(*files[kind]) as encoder:
        if kind == "audio":
            media = encoder.encode(wav())
            assert encoder.encode(wav()) is media
            assert [len(rows.embeddings) for rows in media.rows] == [375]
            return
        media, (_, expected) = encoder.encode(png()), encoded(kind, native)
        assert len(media.rows) == len(expected) == 1
        own, other = media.rows[0], expected[0]
        assert np.array_equal(own.embeddings, other.embeddings)
        assert (own.offsets is None) == (other.offsets is None)
        assert own.offsets is None or np.array_equal(own.offsets, other.offsets)
        assert (own.n_positions, own.causal) == (other.n_positions, other.causal)


def test_a_hash_is_of_pixels_and_not_of_their_file(pictures: MediaEncoder) -> None:
    once, again = pictures.encode(png()), pictures.encode(png(compress_level=0))
    assert once.tokens == again.tokens
    assert pictures.encode(png(2)).tokens != once.tokens


def test_a_picture_is_encoded_once_for_each_namespace(pictures: MediaEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client notices by speed that another one sent the same."""
    encode, n_encoded = pictures.encode_raw, 0

    def counting(data: bytes) -> Any:
        nonlocal n_encoded
        n_encoded += 1
        return encode(data)

    monkeypatch.setattr(pictures, "encode_raw", counting)
    for namespace, n in (("a", 1), ("b", 2), ("a", 2), ("b", 2), ("", 3)):
        encoded_files(pictures, [("mark", png(4711))], namespace=namespace)
        assert n_encoded == n


def test_a_grey_of_16_bits_is_that_of_8(pictures: MediaEncoder) -> None:
    greys = np.arange(64 * 64).reshape(64, 64) % 251
    deep, usual = io.BytesIO(), io.BytesIO()
    Image.fromarray((greys * 257).astype(np.uint16)).save(deep, "PNG")
    Image.fromarray(greys.astype(np.uint8)).save(usual, "PNG")
    assert pictures.encode(deep.getvalue()).tokens == pictures.encode(usual.getvalue()).tokens


def test_a_picture_that_is_held_waits_for_no_other(files: dict[str, tuple[Path, Path]]) -> None:
    begun, ends = threading.Event(), threading.Event()

    class Slow:
        """A device that takes long for one picture, and is lost."""

        def encode(self, data: bytes) -> RawMedia | None:
            if data == png(2):
                begun.set()
                ends.wait(TIMEOUT_S)
            return None

    with MediaEncoder(*files["plain"], device=Slow()) as encoder, ThreadPoolExecutor(2) as pool:
        first = encoder.encode(png(1))
        slow = pool.submit(encoder.encode, png(2))
        try:
            assert begun.wait(TIMEOUT_S)
            assert pool.submit(encoder.encode, png(1)).result(TIMEOUT_S / 2) is first
        finally:
            ends.set()
        assert slow.result(TIMEOUT_S).rows


def test_transparent_points_are_white(pictures: MediaEncoder) -> None:
    transparent, white = io.BytesIO(), io.BytesIO()
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(transparent, "PNG")
    Image.new("RGB", (64, 64), "white").save(white, "PNG")
    assert pictures.encode(transparent.getvalue()).tokens == pictures.encode(white.getvalue()).tokens


def test_of_an_animated_picture_the_first_is_taken(pictures: MediaEncoder) -> None:
    first, second = (Image.fromarray(pixels(seed)).quantize(16) for seed in (1, 2))
    animated, alone = io.BytesIO(), io.BytesIO()
    first.save(animated, "GIF", save_all=True, append_images=[second])
    first.save(alone, "GIF")
    assert pictures.encode(animated.getvalue()).tokens == pictures.encode(alone.getvalue()).tokens


def bomb() -> bytes:
    """A PNG whose header says 50,000 x 50,000."""
    data = bytearray(png())
    data[16:24] = struct.pack(">II", 50_000, 50_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "damaged"),
        (b"no picture at all", "damaged"),
        (png()[:200], "damaged"),
        (bomb(), "50000 x 50000"),
        (b"%PDF-1.4", "damaged"),
        (wav(), "takes no sounds"),
        (bytes(decoding.MOST_BYTES + 1), "up to 32"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(pictures: MediaEncoder, data: bytes, words: str) -> None:
    pid = pictures.pid
    with pytest.raises(MediaError, match=words):
        pictures.encode(data)
    assert pictures.pid == pid
    assert pictures.encode(png()).rows


def test_a_sound_of_an_hour_is_refused(files: dict[str, tuple[Path, Path]]) -> None:
    with MediaEncoder(*files["audio"]) as encoder:
        with pytest.raises(MediaError, match="lasts 3600 s; 600 s is the maximum"):
            encoder.encode(wav(3600, 2000))
        with pytest.raises(MediaError, match="takes no pictures"):
            encoder.encode(png())
        with pytest.raises(MediaError, match="damaged"):
            encoder.encode(b"RIFF\0\0\0\0WAVEnonsense")


def test_a_process_that_ends_while_nothing_is_encoded_is_replaced(files: dict[str, tuple[Path, Path]]) -> None:
    with MediaEncoder(*files["plain"]) as encoder:
        pid = encoder.pid
        end(encoder)
        assert encoder.encode(png()).rows
        assert encoder.pid not in (None, pid)


@pytest.mark.parametrize("moment", ["flush", "readline"])
@pytest.mark.parametrize("data", [png(), png(1) + bytes(1 << 20)], ids=["small", "large"])
def test_a_process_that_ends_during_a_file_costs_an_error(
    moment: str, data: bytes, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MediaEncoder(*files["plain"]) as encoder:
        with monkeypatch.context() as changed:
            own = getattr(encoder._stream, moment)
            changed.setattr(encoder._stream, moment, lambda: (end(encoder), own())[1])
            with pytest.raises(MediaError, match="ended by signal 9"):
                encoder.encode(data)
        assert encoder.encode(data).rows


def end(encoder: MediaEncoder) -> None:
    assert encoder.pid is not None
    pid = encoder.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), "the end of the process")  # the encoder has not looked


def test_an_interrupt_leaves_no_answer_for_the_next_file(
    files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MediaEncoder(*files["plain"]) as encoder:
        expected = encoder.encode(png(2)).tokens
        with monkeypatch.context() as changed:
            changed.setattr(encoder._stream, "readline", interrupt)
            with pytest.raises(KeyboardInterrupt):
                encoder.encode(png(1))
        assert encoder.pid is None
        encoder._cached.clear()
        assert encoder.encode(png(2)).tokens == expected


def interrupt() -> bytes:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": ("str", "llama")}, "not a projector"),
        ({"clip.has_vision_encoder": ("bool", False)}, "neither"),
        ({"clip.projector_type": ("str", "")}, "the type of its projector"),
        ({"clip.projector_type": ("str", "never-heard-of")}, "cannot load"),
        ({"clip.vision.attention.head_count": ("u32", 0)}, "from 1 to"),
        ({"clip.vision.attention.head_count": ("u32", 3)}, "3 heads cannot share 32"),
        ({"clip.vision.image_size": ("u32", 1 << 30)}, "from 1 to"),
        ({"clip.vision.patch_size": ("f32", 8.0)}, "from 1 to"),
    ],
)
def test_a_projector_that_cannot_be_used_is_an_error(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, change: dict[str, tuple[str, object]], words: str
) -> None:
    projector = projectors.projector("plain")
    projector.pairs |= change
    with pytest.raises(MediaError, match=words):
        MediaEncoder(files["plain"][0], projector.write(tmp_path / "mmproj.gguf"))


def test_a_projector_of_another_model_is_an_error(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    other = projectors.projector("plain", n_embd=32).write(tmp_path / "mmproj.gguf")
    with pytest.raises(MediaError, match="mismatch between text model"):
        MediaEncoder(files["plain"][0], other)


def test_ids_say_how_many_rows_follow() -> None:
    rows = EmbeddingRows(b"x", np.zeros((5, 4), np.float32))
    assert [rows_from(token) for token in rows.ids] == [5, 4, 3, 2, 1]
    assert len(set(rows.ids)) == 5


def test_nothing_more_is_encoded_for_nobody(pictures: MediaEncoder) -> None:
    seen: list[str] = []

    def files() -> Iterator[tuple[str, bytes]]:
        for mark in "abc":
            seen.append(mark)
            yield mark, png()

    with pytest.raises(EngineError, match="cancelled"):
        encoded_files(pictures, files(), 3, given_up=lambda: len(seen) == 2)
    assert seen == ["a", "b"]


def test_an_answer_that_ends_within_a_line_is_an_error(
    files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MediaEncoder(*files["plain"]) as encoder:
        with monkeypatch.context() as changed:
            changed.setattr(encoder._stream, "readline", lambda: b'{"digest": ')
            with pytest.raises(MediaError, match="ended by signal 9"):
                encoder.encode(png())
        assert encoder.encode(png()).rows


def test_rows_outlive_what_is_held_of_them(files: dict[str, tuple[Path, Path]]) -> None:
    """A request still has a picture that was encoded once more for another one, which has ended."""
    with MediaEncoder(*files["plain"]) as encoder:
        first = encoder.encode(png())
        encoder._cached.clear()
        second = encoder.encode(png())
        encoder._cached.clear()
        del second
        assert embeddings_of(first.rows[0].ids[0]) is first.rows[0]
