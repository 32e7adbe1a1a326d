"""The `edge` command: finds the subcommand, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from typing import NoReturn

from apps.errors import EXIT_BUG, EXIT_INTERRUPTED, REMEDIES, exit_code
from apps.options import Parser
from devices.streams import OUTPUT, give_up_output, protect_streams
from edge.ending import end_by_signals, signalled, terminated
from quant.text import printable

COMMANDS = (
    "advise", "buy", "chat", "serve", "bench", "model", "quantize", "imatrix", "evaluate", "run", "worker",
    "devices", "link", "plan", "pareto", "lab", "simulate", "cluster", "doctor",
)  # fmt: skip

EXIT_CLOSED_PIPE, EXIT_TERMINATED = 141, 143


def build_parser(command: str | None = None) -> Parser:
    """Return the parser of all commands, or of one alone, which takes half the time of a start. Their modules are
    light to import: engines load when a command runs.

    A module has HELP, `add_arguments`, which adds what it takes to its parser, and `run`, which does it and returns the
    exit code; a command with actions has a function for each in place of `run`.
    """
    parser = Parser(prog="edge", description="Run one model on the devices you have.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in (command,) if command and command in COMMANDS else COMMANDS:
        module = importlib.import_module(f"apps.commands.{name}")
        own = commands.add_parser(name, help=module.HELP, description=module.HELP)
        own.set_defaults(run=getattr(module, "run", None), parser=own)
        module.add_arguments(own)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command line, by default that of this process; return the exit code."""
    if argv is not None:
        return _run(argv)
    try:
        protect_streams()
        end_by_signals()
        code = _run(None)
        return EXIT_TERMINATED if terminated() and code == EXIT_INTERRUPTED else code
    except KeyboardInterrupt:  # raised outside of `_run`
        return EXIT_INTERRUPTED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # the process is ending: a signal would only add a traceback
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def quiet_grpc() -> None:
    """Silence gRPC; call this before it is loaded. Its own lines about failed connections repeat our errors, and it
    would prepare for forks, which do not happen."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _run(argv: list[str] | None) -> int:
    command = "edge"
    quiet_grpc()
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            args = build_parser(*words[:1]).parse_args(words)
            command = args.parser.prog
            code: int = args.run(args)
        finally:  # also after --help, and before an error
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        give_up_output()
        return EXIT_CLOSED_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.filename == OUTPUT:
            give_up_output()
        if os.environ.get("EDGE_DEBUG"):
            raise
        code = exit_code(error)
        if code == EXIT_BUG and signalled():
            return EXIT_INTERRUPTED
        if code != EXIT_INTERRUPTED:
            print(f"{command}: {_one_line(error, code)}", file=sys.stderr)
        return code


def _one_line(error: Exception, code: int) -> str:
    text = " ".join(printable(str(error)).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return error.strerror
        name = printable(os.fsdecode(error.filename))
        return "; ".join(filter(None, (f"{name}: {error.strerror}", REMEDIES.get(error.errno or 0))))
    if code == EXIT_BUG:
        return f"unexpected {type(error).__name__}: {text} (EDGE_DEBUG=1 shows where; please report it)"
    return text


class _Version(argparse.Action):
    """Looks the version up only on request: that takes as long as the rest of --help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from edge.version import version

        print(f"edge {version('edge-runtime')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
