"""Inputs of the trained networks, suited to their purpose, drawn or computed here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tests.real.weights import Weights

Feeds = dict[str, NDArray[Any]]

_WINDOW, _CONTEXT, _RATE = 512, 64, 16000  # samples of a window of speech, those before it, and in a second


def feeds(network: Weights, seed: int = 0) -> Feeds:
    """An input of the network in the sizes that it is used with; another seed gives another one, of other sizes where
    these are open."""
    if network.name.startswith("ch_"):
        return {"x": _lines(network.name, seed)}
    if network.name.startswith("silero"):
        return _speech(network.name, seed)
    return {
        "bytes": np.frombuffer((b"def f(x):\n    return x\n" * 100)[seed : seed + 2048], np.uint8)[None].astype("i4")
    }


def _lines(name: str, seed: int) -> NDArray[np.float32]:
    """A line of text as its reader takes it; for the one that finds text, several on a page."""
    height, width = (160, 224) if "det" in name else (48, 192)
    image = Image.new("RGB", (width + 32 * seed, height), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=32)
    for top in range(4, height - 36, 56):
        draw.text((6, top), f"Edge {seed + top} runs", "black", font=font)
    return ((np.asarray(image, np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None].copy()


def _speech(name: str, seed: int) -> Feeds:
    """A vowel: a tone of 120 Hz and its overtones, with a state that is not empty."""
    rng = np.random.default_rng(seed)
    rows = 1 if "openvino" in name else 1 + seed
    t = (np.arange(_CONTEXT + _WINDOW) + 200 * np.arange(rows)[:, None]) / _RATE
    sound = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 12)) * 0.2
    sound = (sound + 0.01 * rng.standard_normal(sound.shape)).astype(np.float32)
    if "sequence" in name:
        state = {key: rng.standard_normal((1, 1, 128), dtype=np.float32) * 0.1 for key in ("h", "c")}
        return {"input": sound, **state}
    state = {"state": rng.standard_normal((2, rows, 128), dtype=np.float32) * 0.1}
    rate = {} if "half" in name or "openvino" in name else {"sr": np.array(_RATE, np.int64)}
    return {"input": sound, **state, **rate}
