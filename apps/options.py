"""Options that several commands share: which model, and how to load it."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge.engine import EngineOptions

# Named here and not asked of quant.types and edge.engine, so that --help stays quick; a test holds them together.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MAX_CONTEXT = 1 << 24
MAX_THREADS = 512
MAX_SEED = 2**32 - 2


class UsageError(Exception):
    """Options that do not go together."""


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def seed(text: str) -> int:
    """A seed: an integer of 32 bits, like those `--json` reports."""
    return _integer(text, 0, MAX_SEED)


def context_size(text: str) -> int:
    """Tokens of context, from 1 to what an engine takes."""
    return _integer(text, 1, MAX_CONTEXT)


def thread_count(text: str) -> int:
    """An integer from 1 to what ggml has room for."""
    return _integer(text, 1, MAX_THREADS)


def _integer(text: str, least: int, most: int = 2**31 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a whole number, got {text!r}") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"needs a number from {least} to {most}, got {value}")
    return value


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"needs a number, got {text!r}")
    return value


def byte_size(text: str) -> int:
    """Bytes, from "2GiB", "900MiB", "1.5GB" or "943718400B"."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"needs a size such as 2GiB, 900MiB or 943718400B, got {text!r}")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if not 0 < size < 2**60:
        raise argparse.ArgumentTypeError(f"needs a size from 1B to 1024PiB, got {text!r}")
    return size


def device_name(text: str) -> str:
    """A name that a device can have."""
    from devices.errors import TrustError
    from devices.names import check_name

    try:
        return check_name(text)
    except TrustError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """How to load and run the model."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--context", type=context_size, metavar="N", help="tokens of context (default: the model's, at most 4096)"
    )
    group.add_argument("--threads", type=thread_count, metavar="N", help="default: one per physical core")
    group.add_argument(
        "--batch", type=positive_int, default=512, metavar="N", help="prompt tokens in one pass (default: 512)"
    )
    group.add_argument(
        "--gpu-layers", type=natural, metavar="N", help="layers on the GPU (default: all, where the build has one)"
    )
    group.add_argument("--kv-type", choices=KV_TYPES, default="f16", help="type of the KV cache (default: f16)")
    group.add_argument("--flash-attention", choices=("auto", "on", "off"), default="auto")
    group.add_argument(
        "--repack",
        action=argparse.BooleanOptionalAction,
        help="lay weights out for this CPU: faster, takes memory of its own (default: where it fits)",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """The parsed engine options."""
    from edge.engine import EngineOptions

    return EngineOptions(
        context=args.context,
        batch=args.batch,
        threads=args.threads,
        gpu_layers=args.gpu_layers,
        repack=args.repack,
        flash_attention=args.flash_attention,
        kv_type=args.kv_type,
    )


def model_path(spec: str | None) -> Path:
    """The model to run: the bundled one, a local file, or REPO:FILE from the hub (fetched where it is not cached)."""
    from edge.demo import MODEL_PATH

    if spec is None:
        return MODEL_PATH
    from apps.progress import progress
    from edge.hub import resolve

    with progress(f"Fetching {spec}") as bar:
        return resolve(spec, bar.update)
