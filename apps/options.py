"""Options that several commands share: which model, and how to load it."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from apps.errors import UsageError
from edge.units import parse_bytes

if TYPE_CHECKING:
    from edge.llm.options import EngineOptions

# Named here and not asked of quant.types and edge.llm.engine, so that --help stays quick; a test holds them together.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MAX_CONTEXT = 1 << 24
MAX_THREADS = 512
MAX_IO_THREADS = 64
MAX_IO_CHUNK = 256 << 20
MAX_IN_FLIGHT = 64
MAX_SEED = 2**32 - 2
QUANTIZE_MINUTES = 10.0


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


def io_threads(text: str) -> int:
    """Threads that read, from 1 to what an engine takes."""
    return _integer(text, 1, MAX_IO_THREADS)


def io_chunk(text: str) -> int:
    """Bytes of one read, up to what an engine takes."""
    size = byte_size(text)
    if size > MAX_IO_CHUNK:
        raise argparse.ArgumentTypeError(f"needs a size of at most {MAX_IO_CHUNK >> 20}MiB, got {text}")
    return size


def _integer(text: str, least: int, most: int | None = None) -> int:
    """most: None where nobody means as many as fit in 31 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a whole number, got {text!r}") from None
    if value < least and most is None:
        raise argparse.ArgumentTypeError(f"needs a whole number, {least} or more, got {value}")
    top = 2**31 - 1 if most is None else most
    if not least <= value <= top:
        raise argparse.ArgumentTypeError(f"needs a whole number from {least} to {top}, got {value}")
    return value


def in_flight(text: str) -> int:
    """Inputs that are under way at a time."""
    return _integer(text, 1, MAX_IN_FLIGHT)


def dimension(text: str) -> tuple[str, int]:
    """The name of a dimension and its value, from "NAME=N"."""
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"needs NAME=N, got {text!r}")
    return name, positive_int(value)


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"needs a number, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0, got {text!r}")
    return value


def items(text: str) -> list[str]:
    """Of a list with commas, spaces or both between its items."""
    found = text.replace(",", " ").split()
    if not found or re.search(r"^\s*,|,\s*,|,\s*$", text):
        raise argparse.ArgumentTypeError(f"needs a list such as A,B, got {text[:80]!r}")
    return found


def byte_size(text: str) -> int:
    """Bytes, from "2GiB", "900MiB", "1.5GB" or "943718400B"."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def cores(text: str) -> tuple[int, ...]:
    """Numbers of cores, from "0,2-3"."""
    from devices.cores import parse_cores

    try:
        return parse_cores(",".join(items(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_usable(cores: Sequence[int], where: str = "--affinity") -> None:
    """UsageError, with `where` they were named, unless this machine has these cores, and lets us choose them."""
    from devices.cores import check_cores

    try:
        check_cores(cores)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


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
    group.add_argument(
        "--threads",
        type=thread_count,
        metavar="N",
        help="default: by cores and model",
    )
    group.add_argument("--affinity", type=cores, metavar="CORES", help="run on these cores only, such as 0,2-3")
    group.add_argument(
        "--batch",
        type=positive_int,
        metavar="N",
        help="prompt tokens in one pass (default: 512; with --memory, measured)",
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
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--memory", type=byte_size, metavar="SIZE", help="use at most so much, such as 3GiB: what of the model does not"
        " fit is read from disk again for every token (default: no limit)"
    )  # fmt: skip
    group.add_argument(
        "--window", type=byte_size, metavar="SIZE", help="part of it that such weights pass through (default: measured)"
    )
    group.add_argument("--io-threads", type=io_threads, metavar="N", help="that read them (default: measured)")
    group.add_argument("--io-chunk", type=io_chunk, metavar="SIZE", help="that is read at once (default: measured)")
    group.add_argument("--verify", action="store_true", help="check that what is read again has not changed")


def check_output(output: Path, sources: Iterable[Path], force: bool) -> None:
    """UsageError where a file cannot be written, or must not: to be known before anything is computed. It is this
    command's from then on: another one that is to write it is refused.

    sources: all files that are read, which nothing may replace. force: any other one may be replaced.
    """
    from devices.files import claim

    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file in it")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {output.absolute().parent}; create it first")
    if not claim(output):
        raise UsageError(f"another edge command is writing {output}; wait for it, or give another name to write to")
    if not output.exists():
        return
    if not output.is_file():
        raise UsageError(f"{output} is no regular file; give another name to write to")
    if any(path.exists() and output.samefile(path) for path in sources):
        raise UsageError(f"{output} is read, so it cannot be written; give another name to write to")
    if not force:
        raise UsageError(f"{output} exists; --force overwrites it")


def check_onnx(pictures: bool = False) -> None:
    """UsageError where what ONNX models need is not installed; pictures: what reading these needs, too."""
    needed = {"onnx": "onnx", "onnxruntime": "onnxruntime"} | ({"PIL": "pillow"} if pictures else {})
    lacking = [name for module, name in needed.items() if find_spec(module) is None]
    if lacking:
        raise UsageError(f'{", ".join(lacking)} needed for this: pip install "edge-runtime[onnx]"')


def check_dimensions(given: Sequence[tuple[str, int]]) -> None:
    """UsageError where --dim names one twice."""
    if len({name for name, _ in given}) < len(given):
        raise UsageError("--dim gives one dimension two values; give it once")


def keep_to_cores(cores: Sequence[int] | None, where: str = "--affinity") -> None:
    """Run on these cores from now on, where some are named. Call it before anything starts threads. UsageError, with
    `where` they were named, where they cannot be had."""
    if cores:
        from devices.cores import keep_to

        check_usable(cores, where)
        keep_to(cores)


def quiet_grpc() -> None:
    """To be called before gRPC is loaded. It writes lines of its own about connections that failed; ours say the same
    in words. And it would prepare for forks, of which there are none."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def engine_options(args: argparse.Namespace, sequences: int = 1, *, follows_load: bool = False) -> EngineOptions:
    """The parsed engine options, for so many sequences. follows_load: without --threads, there are as many as others
    leave free. UsageError for options that do not go together."""
    from edge.llm.options import EngineOptions

    given = next((name for name in ("window", "io_threads", "io_chunk", "verify") if getattr(args, name)), None)
    if args.memory is None and given is not None:
        raise UsageError(f"--{given.replace('_', '-')} is about a budget: give one with --memory SIZE")
    if args.memory is not None and args.gpu_layers:
        raise UsageError("--memory is a budget of this machine's own memory; leave --gpu-layers out, or the budget")
    return EngineOptions(
        context=args.context,
        batch=args.batch,
        sequences=sequences,
        threads=args.threads,
        follows_load=follows_load,
        gpu_layers=args.gpu_layers,
        repack=args.repack,
        flash_attention=args.flash_attention,
        kv_type=args.kv_type,
        memory=args.memory,
        window=args.window,
        io_threads=args.io_threads,
        io_chunk=args.io_chunk,
        verify=args.verify,
    )


def model_path(spec: str | None) -> Path:
    """The model to run: the bundled one, a local file, or REPO:FILE from the hub (fetched where it is not cached)."""
    from edge.demo import MODEL_PATH

    if spec is None:
        return MODEL_PATH
    from apps.show.progress import progress
    from edge.models.hub import resolve

    with progress(f"Fetching {spec}") as bar:
        return resolve(spec, bar.update)
