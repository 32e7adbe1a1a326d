"""Damaged pictures and sounds: each is taken or refused, the process that reads them goes on, in bounded memory."""

import io
import random
import struct
import zlib
from collections import Counter
from pathlib import Path

import psutil
import pytest
from PIL import Image

from edge.errors import MediaError
from edge.media.encoder import MediaEncoder
from tests.fuzz.kinds import mutated
from tests.support import projectors
from tests.support.multimodal import pixels, wav
from tests.support.thorough import some

N_PICTURES, N_SOUNDS = some((60, 20), (800, 200))
MOST_MORE = 400 << 20  # bytes that the process may have at its peak, beside what it has at first


def seeds() -> list[bytes]:
    """A picture in each format and mode."""
    files = []
    for name, mode in [("PNG", "RGB"), ("PNG", "P"), ("PNG", "LA"), ("PNG", "I;16"), ("JPEG", "RGB"), ("JPEG", "CMYK"),
                       ("WEBP", "RGBA"), ("GIF", "P"), ("BMP", "RGB"), ("BMP", "1")]:  # fmt: skip
        image = Image.fromarray(pixels(width=40, height=30))
        image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
        image.save(data := io.BytesIO(), name)
        files.append(data.getvalue())
    return files


def hostile_picture(chance: random.Random, good: list[bytes]) -> bytes:
    data = bytearray(mutated(chance, chance.choice(good)))
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 33 and chance.random() < 0.3:  # sizes that checksums confirm
        sides = (chance.choice((0, 1, 19_999, 50_000, 2**31 - 1)) for _ in range(2))
        data[16:24] = struct.pack(">II", *sides)

        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize("kind", ["plain", "audio"])
def test_hostile_files_cost_errors_and_nothing_more(kind: str, tmp_path: Path) -> None:
    chance, came = random.Random(kind), Counter[str]()
    sounds = [wav(0.3), wav(0.1, 8000), b"ID3" + wav(0.2)[44:], b"fLaC" + wav(0.2)[44:], b"\xff\xfb\x90\x00" * 400]
    pictures = seeds()
    with MediaEncoder(*projectors.write(kind, tmp_path)) as encoder:
        process = psutil.Process(encoder.pid)
        before = process.memory_info().rss
        for _ in range(N_SOUNDS if kind == "audio" else N_PICTURES):
            data = mutated(chance, chance.choice(sounds)) if kind == "audio" else hostile_picture(chance, pictures)
            try:
                came["taken" if encoder.encode(data).rows else "empty"] += 1
            except MediaError:
                came["refused"] += 1
            assert encoder.pid == process.pid
        peak = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) * 1024 - before < MOST_MORE
    assert came["taken"]
    assert came["refused"]
    assert not came["empty"]
