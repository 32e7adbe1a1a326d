"""Options that several commands share: the model, and how to load it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from apps.errors import UsageError
from devices.errors import TrustError
from edge import units
from partition.predict.drafts import KINDS, SELF
from quant.text import printable

# Copies of names in quant.types and edge.llm.engine, so that --help stays quick; a test compares them.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
PREFERENCES = ("speed", "quality")
TRANSPORTS = ("auto", "tcp", "grpc")
WIRES = ("f32", "f16", "q8")
MOST_WORKERS = 63
AUTO = ("auto",)  # in place of addresses: all workers that are found
MAX_CONTEXT = 1 << 24
MAX_THREADS = 512
MAX_IO_THREADS = 64
MAX_IO_CHUNK = 256 << 20
MAX_IN_FLIGHT = 64
MAX_SEED = 2**32 - 2
QUANTIZE_MINUTES = 10.0
ELASTIC_SIZES = 4
ANY_MODEL = "GGUF or ONNX file, a known name, or REPO:FILE (default: the bundled model)"

in_flight, threads = units.whole(1, MAX_IN_FLIGHT), units.whole(1, MAX_THREADS)
seed = units.whole(0, MAX_SEED)  # of 32 bits, like those `--json` reports
kv_type, io_chunk = units.one_or_two(KV_TYPES), units.bytes_up_to(MAX_IO_CHUNK)


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake instead of the whole usage, in the words of who parses a value."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but report an unknown argument as a mistake of the subcommand, and not of `edge`."""
        namespace_found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(f"unknown argument {unknown[0]}{_meant(unknown[0].partition('=')[0], options)}")
        return namespace_found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except (ValueError, TrustError) as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as argparse does, and suggest the choice that is nearest to a mistyped one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _meant(str(value), map(str, action.choices or ()))
            raise


def _meant(name: str, known: Iterable[str]) -> str:
    """Return text that suggests the known word nearest to a mistyped one."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def byte_size_or_none(text: str) -> int:
    """Return a size, or 0."""
    return 0 if text.strip() == "0" else units.parse_bytes(text)


def address(text: str) -> str:
    """Return HOST:PORT of a worker; the port may be left out."""
    from devices.names import join_address, parse_address

    return join_address(*parse_address(text))


def worker_addresses(text: str) -> tuple[str, ...]:
    """Return HOST:PORT of each worker. This device may be named first."""
    parts = units.items(text)
    if "local" in parts[1:]:
        raise ValueError("this device comes first, so only the first can be `local`")
    if parts == ["local"]:
        raise ValueError("this device alone needs no --workers")
    parts = parts[1:] if parts[0] == "local" else parts  # this device always takes part
    if len(parts) > MOST_WORKERS:
        raise ValueError(f"takes up to {MOST_WORKERS} workers, got {len(parts)}")
    return tuple(map(address, parts))


def workers_or_auto(text: str) -> tuple[str, ...]:
    """Parse as `worker_addresses`; AUTO stands for all workers that are found."""
    return AUTO if text == "auto" else worker_addresses(text)


def cores(text: str) -> tuple[int, ...]:
    """Return numbers of cores from "0,2-3"."""
    from devices.cores import parse_cores

    return parse_cores(",".join(units.items(text)))


def device_name(text: str) -> str:
    """Return a valid name of a device."""
    from devices.names import check_name

    return check_name(text)


def check_usable(cores: Sequence[int], where: str = "--affinity") -> None:
    """Raise UsageError, with the option `where` cores were named, unless this machine has them and lets a process
    choose them."""
    from devices.cores import check_cores

    try:
        check_cores(cores)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


# Options of several commands, as arguments of argparse. A command may change the help text.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "nargs": "?", "metavar": "MODEL", "help": "GGUF file, a known name, or REPO:FILE (default: the bundled model)",
    },
    "--affinity": {"type": cores, "metavar": "CORES", "help": "run on these cores only, such as 0,2-3"},
    "--attention-window": {
        "type": units.whole(64, MAX_CONTEXT), "metavar": "N",
        "help": "attend to the first 4 and the last N tokens alone (default: all)",
    },
    "--chunk-tokens": {
        "type": units.positive_int, "default": 512, "metavar": "N", "help": "computed at a time (default: 512)",
    },
    "--cluster": {"type": Path, "metavar": "FILE", "help": "devices and links: cluster.toml"},
    "--context": {"type": units.whole(1, MAX_CONTEXT), "metavar": "N"},
    "--dim": {
        "action": "append", "type": units.dimension, "metavar": "NAME=N",
        "help": "size of an open ONNX dimension, also as INPUT[AXIS]=N",
    },
    "--force": {"action": "store_true", "help": "overwrite files"},
    "--gpu-layers": {"type": units.natural, "metavar": "N"},
    "--gpu-memory": {"type": units.parse_bytes, "metavar": "SIZE"},
    "--input": {
        "action": "append", "metavar": "[NAME=]FILE",
        "help": "a picture, or a .npz file with an array for each ONNX input; may be given more than once",
    },
    "--in-flight": {
        "type": in_flight, "metavar": "N", "help": "inputs in flight for throughput (default: what fills it)",
    },
    "--insecure": {"action": "store_true", "help": "allow workers that run with --insecure"},
    "--json": {"action": "store_true", "help": "print one JSON object"},
    "--kv-type": {"type": kv_type, "metavar": "TYPE", "help": "of the KV cache, or KEYS/VALUES (default: f16)"},
    "--mmproj": {"type": Path, "metavar": "FILE", "help": "projector of pictures and sounds (default: mmproj-MODEL)"},
    "--lora": {"action": "append", "metavar": "FILE[:SCALE]", "help": "LoRA adapter, times SCALE (1); repeatable"},
    "--memory": {"type": units.parse_bytes, "metavar": "SIZE"},
    "--plan": {"type": Path, "metavar": "FILE", "help": "run as a saved plan says, instead of --workers"},
    "--png": {"type": Path, "metavar": "FILE", "help": "draw size against divergence"},
    "--prefix-cache": {
        "type": byte_size_or_none, "metavar": "SIZE",
        "help": "disk space for what was computed of prompts, encrypted; 0: nothing is kept (default: 2GiB)",
    },
    "--reproducible": {
        "action": "store_true",
        "help": "the same command gives the same tokens each time on these devices, for some speed"
        " (docs/reproducible.md)",
    },
    "--save-plan": {"type": Path, "metavar": "FILE", "help": "write the plan as JSON, to be used or edited"},
    "--shares": {"type": units.shares, "metavar": "X,Y,Z"},
    "--timeout": {"type": units.between(0.1, 3600), "metavar": "S"},
    "--threads": {"type": threads, "metavar": "N", "help": "default: one per physical core"},
    "--transport": {"choices": TRANSPORTS, "help": "of links (default: auto, tcp if it is reached, else grpc)"},
    "--wire": {"choices": WIRES, "help": "type of floats between devices (default: f32)"},
    "--workers": {"type": worker_addresses, "metavar": "A,B", "help": "this device and HOST[:PORT],..."},
}  # fmt: skip


def add(parser: argparse._ActionsContainer, *names: str, **otherwise: Any) -> None:
    """Add options of OPTIONS. otherwise: arguments that differ in this command."""
    for name in names:
        parser.add_argument(name, **{**OPTIONS[name], **otherwise})


def option(
    parser: argparse._ActionsContainer, name: str, text: str, type: Callable[[str], Any] = str, **how: Any
) -> None:
    """Add an option with its help. name: "--name METAVAR" for one with a value; "--name" for one that is set, has
    choices, or does as its `action`."""
    flag, _, metavar = name.partition(" ")
    if metavar:
        how |= {"type": type, "metavar": metavar}
    elif not how.keys() & {"action", "choices"}:
        how["action"] = "store_true"
    parser.add_argument(flag, help=text, **how)


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise UsageError if one of these options was given. why: text that follows its name."""
    for name in names:
        if (value := getattr(args, name, None)) is not None and value is not False:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def add_draft_arguments(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the options for drafting tokens, so that one pass verifies several, and for the worker that drafts."""
    known = ", ".join((*KINDS, SELF))
    words = f"draft tokens and check several in a pass: {known}, or a small model (default: {default})"
    option(parser, "--draft HOW", words)
    words = "let this worker draft, by the model that --draft names; tokens alone go there: HOST[:PORT]"
    option(parser, "--draft-worker ADDRESS", words, address)


def apply_reproducible(args: argparse.Namespace) -> None:
    """With --reproducible, turn off all that depends on time. UsageError for options that ask for it."""
    if not args.reproducible:
        return
    why = "depends on how long steps take, so answers would not be the same each time: leave it or --reproducible out"
    if args.draft not in (None, "off"):
        raise UsageError(f"--draft {args.draft} {why}")
    if args.prefix_cache:
        raise UsageError("--prefix-cache changes in which steps a prompt is computed: leave it or --reproducible out")
    if args.workers == AUTO:
        raise UsageError("--workers auto takes those that are found: name them, or leave --reproducible out")
    args.draft, args.prefix_cache = "off", 0


def check_draft_worker(args: argparse.Namespace) -> None:
    """Raise UsageError if a worker is to draft, and --draft names no model for it."""
    if args.draft_worker is not None and args.draft in (None, *KINDS):
        named = f"--draft is {args.draft}" if args.draft else "none is named"
        raise UsageError(f"--draft-worker drafts by a model, and {named}: name one with --draft FILE, or --draft self")


def check_output(output: Path, sources: Iterable[Path], force: bool) -> None:
    """Raise UsageError if a file cannot be written, or must not be: called before anything is computed. The file then
    belongs to this command: another command is refused.

    sources: files that are read, which must not be replaced. force: any other file may be replaced.
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
    """Raise UsageError if packages for ONNX models are not installed; pictures: also those for reading pictures."""
    check_installed({"onnx": "onnx", "onnxruntime": "onnxruntime"} | ({"PIL": "pillow"} if pictures else {}))


def check_installed(packages: Mapping[str, str], use: str = "this", extra: str = "onnx") -> None:
    """Raise UsageError, with their use and the extra that installs them, if packages are not installed. packages: the
    module to import of each, and its name."""
    lacking = [name for module, name in packages.items() if find_spec(module) is None]
    if lacking:
        raise UsageError(f'{", ".join(lacking)} needed for {use}: pip install "edge-runtime[{extra}]"')


def check_dimensions(dimensions: Sequence[tuple[str, int]]) -> None:
    """Raise UsageError if --dim names a dimension twice."""
    if len({name for name, _ in dimensions}) < len(dimensions):
        raise UsageError("--dim gives one dimension two values; give it once")


def keep_to_cores(cores: Sequence[int] | None, where: str = "--affinity") -> None:
    """Run on these cores from now on, if any are named. Call it before anything starts threads. UsageError, with the
    option `where` they were named, if they are not available."""
    if cores:
        from devices.cores import pin_to_cores

        check_usable(cores, where)
        pin_to_cores(cores)


def is_onnx(model: str | None) -> bool:
    """Return whether this names an ONNX file."""
    return model is not None and model.endswith(".onnx")


def model_path(spec: str | None) -> Path:
    """Return the model to run: the bundled one, a local file, a named model, or REPO:FILE from the hub. The last two
    are fetched if they are not here yet."""
    from edge.demo import MODEL_PATH

    if spec is None:
        return MODEL_PATH
    from apps.show.progress import progress
    from edge.models import paths

    with progress(f"Fetching {spec}") as show:
        return paths.model_path(spec, show)
