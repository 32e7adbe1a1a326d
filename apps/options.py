"""Options that several commands share, and checks on their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from apps.errors import UsageError
from devices.errors import TrustError
from devices.sizes import parse_bytes
from edge import units
from edge.llm.options import MAX_CONTEXT, MAX_IO_CHUNK, MAX_THREADS, MIN_WINDOW
from partition.predict.drafts import KINDS, SELF
from quant.text import printable
from quant.types import KV_TYPES

TRANSPORTS = ("auto", "tcp", "grpc")
WIRES = ("f32", "f16", "q8")
MOST_WORKERS = 63
AUTO = ("auto",)  # instead of addresses: all workers that are discovered
MAX_IN_FLIGHT = 64
MAX_SEED = 2**32 - 2  # a copy of the name in edge.llm.sampler, so that --help stays quick; a test compares them
QUANTIZE_MINUTES = 10.0
ELASTIC_SIZES = 4
ANY_MODEL = "GGUF or ONNX file, a known name, or REPO:FILE (default: the bundled model)"

in_flight, threads = units.whole(1, MAX_IN_FLIGHT), units.whole(1, MAX_THREADS)
seed = units.whole(0, MAX_SEED)  # 32 bits, like the seeds that `--json` reports
kv_type, io_chunk = units.one_or_two(KV_TYPES), units.bytes_up_to(MAX_IO_CHUNK)


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake prints one line, in the words of the function that parses the value.

    `common` names the options that --help lists; --help-all lists every option. Empty: --help lists every option, too.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.common: frozenset[str] = frozenset()
        if self.add_help:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Return the text of --help."""
        if not self.common:
            return super().format_help()
        options = [action for action in self._actions if action.option_strings and action.help != argparse.SUPPRESS]
        shown = [action for action in options if not (self.common | {"--help"}).isdisjoint(action.option_strings)]
        arguments = [action for action in self._actions if not action.option_strings]
        text = self.formatter_class(prog=f"{self.prog} [options]")
        text.add_usage(None, arguments, [])
        text.add_text(self.description)
        for title, actions in (("arguments", arguments), ("options", shown)):
            text.start_section(title)
            text.add_arguments(actions)
            text.end_section()
        text.add_text(f"{self.prog} --help-all lists {len(options) - len(shown)} more options.")
        return text.format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but report an unknown argument as a mistake of the subcommand and not of `edge`."""
        namespace_found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if not unknown[0].startswith("-"):
                hint = "join the values of a list by commas, put names with spaces in quotes"
                self.error(f"one argument too many: {unknown[0]!r}; {hint}")
            if unknown[0].partition("=")[0] in ("-m", "--model"):
                self.error(f"unknown argument {unknown[0]}; write MODEL without an option")
            options = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(f"unknown argument {unknown[0]}{_meant(unknown[0].partition('=')[0], options)}")
        return namespace_found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except (ValueError, TrustError) as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as argparse does. A mistyped choice gets the nearest one suggested instead of the list of all."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = _meant(str(value), map(str, action.choices or ()))
            if meant:
                error.message = f"invalid choice: {value!r}{meant}"
            raise


class _HelpAll(argparse.Action):
    """Prints the help of every option and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        set_common(parser, "")
        parser.print_help()
        parser.exit()


def set_common(parser: argparse.ArgumentParser, names: str) -> None:
    """Make --help of this parser list only these options, and --help-all every option.

    names: the options that most people use, separated by spaces.
    """
    assert isinstance(parser, Parser)
    parser.common = frozenset(names.split())


def _meant(name: str, known: Iterable[str]) -> str:
    """Return text that suggests the known word nearest to `name`, or "" if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def byte_size_or_none(text: str) -> int:
    """Return a size in bytes; "0" gives 0."""
    return 0 if text.strip() == "0" else parse_bytes(text)


def address(text: str) -> str:
    """Return HOST:PORT of a worker, from its address or its name."""
    from edge.cluster.members import address_of

    return address_of(text)


def worker_addresses(text: str) -> tuple[str, ...]:
    """Return HOST:PORT of each worker. The first item may be `local`, which is this device."""
    parts = units.items(text)
    if "local" in parts[1:]:
        raise ValueError("`local` is this device and must be the first")
    if parts == ["local"]:
        raise ValueError("`local` alone needs no --workers: leave it out")
    parts = parts[1:] if parts[0] == "local" else parts  # this device always takes part
    if len(parts) > MOST_WORKERS:
        raise ValueError(f"takes up to {MOST_WORKERS} workers, got {len(parts)}")
    return tuple(map(address, parts))


def workers_or_auto(text: str) -> tuple[str, ...]:
    """Parse as `worker_addresses` does; "auto" gives AUTO, all workers that are discovered."""
    return AUTO if text == "auto" else worker_addresses(text)


def cores(text: str) -> tuple[int, ...]:
    """Return core numbers from text such as "0,2-3"."""
    from devices.cores import parse_cores

    return parse_cores(",".join(units.items(text)))


def device_name(text: str) -> str:
    """Return the name of a device. Raises ValueError if it is not allowed."""
    from devices.names import check_name

    return check_name(text)


def check_usable(cores: Sequence[int], where: str = "--affinity") -> None:
    """Raise UsageError if this machine lacks one of the cores, or does not let a process choose cores.

    where: option that named the cores, for the message.
    """
    from devices.cores import check_cores

    try:
        check_cores(cores)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


# Options of several commands, as arguments of argparse. A command may replace the help text.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "nargs": "?", "metavar": "MODEL", "help": "GGUF file, a known name, or REPO:FILE (default: the bundled model)",
    },
    "--affinity": {"type": cores, "metavar": "CORES", "help": "run on these cores only, such as 0,2-3"},
    "--attention-window": {
        "type": units.whole(MIN_WINDOW, MAX_CONTEXT), "metavar": "N",
        "help": "attend only to the first 4 and the last N tokens (default: to all)",
    },
    "--chunk-tokens": {
        "type": units.positive_int, "default": 512, "metavar": "N", "help": "tokens in each chunk (default: 512)",
    },
    "--cluster": {"type": Path, "metavar": "FILE", "help": "read devices and links from this file (cluster.toml)"},
    "--context": {"type": units.whole(1, MAX_CONTEXT), "metavar": "N"},
    "--dim": {
        "action": "append", "type": units.dimension, "metavar": "NAME=N",
        "help": "size of an ONNX dimension that the model leaves open, also as INPUT[AXIS]=N; repeatable",
    },
    "--force": {"action": "store_true", "help": "overwrite files"},
    "--gpu-layers": {"type": units.natural, "metavar": "N"},
    "--gpu-memory": {"type": parse_bytes, "metavar": "SIZE"},
    "--input": {
        "action": "append", "metavar": "[NAME=]FILE",
        "help": "picture, or .npz file with an array for each ONNX input; repeatable",
    },
    "--in-flight": {
        "type": in_flight, "metavar": "N",
        "help": "inputs in flight while throughput is measured (default: as many as the pipeline needs)",
    },
    "--insecure": {"action": "store_true", "help": "allow workers started with --insecure, without encryption"},
    "--json": {"action": "store_true", "help": "print one JSON object"},
    "--kv-type": {
        "type": kv_type, "metavar": "TYPE", "help": "type of the KV cache, or KEYS/VALUES (default: f16)",
    },
    "--mmproj": {
        "type": Path, "metavar": "FILE", "help": "projector for pictures and sounds (default: the file mmproj-MODEL)",
    },
    "--lora": {
        "action": "append", "metavar": "FILE[:SCALE]", "help": "apply a LoRA adapter (default SCALE: 1); repeatable",
    },
    "--memory": {"type": parse_bytes, "metavar": "SIZE"},
    "--plan": {"type": Path, "metavar": "FILE", "help": "run a saved plan, instead of --workers"},
    "--png": {"type": Path, "metavar": "FILE", "help": "draw size against divergence"},
    "--prefix-cache": {
        "type": byte_size_or_none, "metavar": "SIZE",
        "help": "disk space for the encrypted KV cache of earlier prompts; 0: store nothing (default: 2GiB)",
    },
    "--reproducible": {
        "action": "store_true",
        "help": "make the same command give the same tokens each time on these devices, at some cost of speed"
        " (docs/reproducible.md)",
    },
    "--save-plan": {"type": Path, "metavar": "FILE", "help": "write the plan as JSON, for --plan or for editing"},
    "--shares": {"type": units.shares, "metavar": "X,Y,Z"},
    "--timeout": {"type": units.between(0.1, 3600), "metavar": "S"},
    "--threads": {"type": threads, "metavar": "N", "help": "number of threads (default: one per physical core)"},
    "--transport": {
        "choices": TRANSPORTS, "help": "protocol of links (default: auto, tcp if it can be reached, else grpc)",
    },
    "--survey-seconds": {
        "type": units.between(0, 3600), "metavar": "N",
        "help": "time for measuring devices and links, in seconds; 0: use estimates (default: 20)",
    },
    "--wire": {"choices": WIRES, "help": "type of the values sent between devices (default: f32)"},
    "--workers": {
        "type": worker_addresses, "metavar": "A,B",
        "help": "use this device and these workers: names or HOST[:PORT],...",
    },
}  # fmt: skip


def add(parser: argparse._ActionsContainer, *names: str, **otherwise: Any) -> None:
    """Add options of OPTIONS to a parser. otherwise: arguments that differ in this command."""
    for name in names:
        parser.add_argument(name, **{**OPTIONS[name], **otherwise})


def option(
    parser: argparse._ActionsContainer, name: str, text: str, type: Callable[[str], Any] = str, **how: Any
) -> None:
    """Add an option to a parser.

    name: "--name METAVAR" for an option with a value; "--name" for a flag, or for an option with `choices` or an
    `action` in `how`.
    text: the help text.
    type: function that parses the value.
    """
    flag, _, metavar = name.partition(" ")
    if metavar:
        how |= {"type": type, "metavar": metavar}
    elif not how.keys() & {"action", "choices"}:
        how["action"] = "store_true"
    parser.add_argument(flag, help=text, **how)


def add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Return the parser of an action of a command, with a text for both the list of actions and its own help."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options with these names that the user gave, by name."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise UsageError if the user gave one of these options. why: the message after the option's name."""
    for name in names:
        if (value := getattr(args, name, None)) is not None and value is not False:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def add_draft_arguments(parser: argparse._ActionsContainer, default: str) -> None:
    """Add the options for speculative decoding: the method, and the worker that drafts. default: default method."""
    known = ", ".join((*KINDS, SELF))
    words = f"draft tokens and verify several in one pass: {known}, or a small model (default: {default})"
    option(parser, "--draft HOW", words)
    words = "worker that drafts with the model of --draft and exchanges only tokens: HOST[:PORT]"
    option(parser, "--draft-worker ADDRESS", words, address)


def apply_reproducible(args: argparse.Namespace) -> None:
    """With --reproducible, turn off everything that depends on time. Raises UsageError if options turn it on."""
    if not args.reproducible:
        return
    why = "depends on how long steps take, so answers would differ from run to run: leave it or --reproducible out"
    if args.draft not in (None, "off"):
        raise UsageError(f"--draft {args.draft} {why}")
    if args.prefix_cache:
        raise UsageError("--prefix-cache changes the steps that compute a prompt: leave it or --reproducible out")
    if args.workers == AUTO:
        raise UsageError("--workers auto can find other workers each time: name them, or leave --reproducible out")
    args.draft, args.prefix_cache = "off", 0


def check_draft_worker(args: argparse.Namespace) -> None:
    """Raise UsageError if --draft-worker is used and --draft names no model for that worker."""
    if args.draft_worker is not None and args.draft in (None, *KINDS):
        named = f"--draft is {args.draft}" if args.draft else "--draft is missing"
        raise UsageError(f"--draft-worker needs a model to draft with, but {named}: use --draft FILE or --draft self")


def check_output(output: Path, sources: Iterable[Path], force: bool) -> None:
    """Claim a file for writing, before anything is computed: other edge commands are refused it from now on.

    sources: files that the command reads, which must not be overwritten.
    force: overwrite any other existing file.

    Raises UsageError if the file cannot or must not be written.
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
        raise UsageError(f"{output} is not a regular file; give another name to write to")
    if any(path.exists() and output.samefile(path) for path in sources):
        raise UsageError(f"{output} is read by this command and cannot be overwritten; give another name")
    if not force:
        raise UsageError(f"{output} exists; --force overwrites it")


def check_onnx(pictures: bool = False) -> None:
    """Raise UsageError if packages for ONNX models are missing. pictures: also check those that read pictures."""
    check_installed({"onnx": "onnx", "onnxruntime": "onnxruntime"} | ({"PIL": "pillow"} if pictures else {}))


def check_installed(packages: Mapping[str, str], use: str = "this", extra: str = "onnx") -> None:
    """Raise UsageError if packages are not installed.

    packages: package name by the name of the module to import.
    use: purpose of the packages, for the message.
    extra: extra of edge-runtime that installs them.
    """
    lacking = [name for module, name in packages.items() if find_spec(module) is None]
    if lacking:
        raise UsageError(f'{", ".join(lacking)} needed for {use}: pip install "edge-runtime[{extra}]"')


def check_dimensions(dimensions: Sequence[tuple[str, int]]) -> None:
    """Raise UsageError if --dim names a dimension twice."""
    if len({name for name, _ in dimensions}) < len(dimensions):
        raise UsageError("--dim names the same dimension twice; give it one size")


def keep_to_cores(cores: Sequence[int] | None, where: str = "--affinity") -> None:
    """Bind this process to cores, if any are named. Call it before any thread starts.

    where: option that named the cores, for the message.

    Raises UsageError if the cores are not available.
    """
    if cores:
        from devices.cores import pin_to_cores

        check_usable(cores, where)
        pin_to_cores(cores)


def is_onnx(model: str | None) -> bool:
    """Return whether `model` names an ONNX file."""
    return model is not None and model.endswith(".onnx")


def model_path(spec: str | None) -> Path:
    """Return the file of the model that `spec` names: a local file, a known name, or REPO:FILE on the hub.

    None is the bundled model. A model on the hub is downloaded if it is not here yet.
    """
    from edge.models.demo import MODEL_PATH

    if spec is None:
        return MODEL_PATH
    from apps.show.progress import progress
    from edge.models import paths

    local = paths.local_path(spec)
    if local is not None:
        return local
    with progress(f"Fetching {spec}") as show:
        return paths.pull(spec, show)
