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

BEGIN = """\
To begin with:
  edge chat              talk to the small bundled model
  edge advise            list the models that run well on this device
  edge chat MODEL        talk to one of them; edge fetches it once
  edge serve MODEL       serve it to other programs and to your browser
  edge lab up            emulate three devices here, to try a model on several devices

edge --help lists all commands, edge COMMAND --help the options of one."""

COMMANDS = (
    "advise", "buy", "chat", "serve", "bench", "model", "quantize", "imatrix", "evaluate", "run", "worker",
    "devices", "link", "plan", "pareto", "lab", "simulate", "cluster", "doctor", "top",
)  # fmt: skip

EXIT_CLOSED_PIPE, EXIT_TERMINATED = 141, 143


def build_parser(command: str | None = None) -> Parser:
    """Return the parser of all commands, or of one command, which makes a start twice as fast.

    Each command is a module with HELP (its summary), `add_arguments` (adds its options to a parser) and `run` (runs it
    and returns the exit code). A command with actions sets a `run` function for each action instead. The modules import
    quickly: engines load when a command runs.
    """
    words = "edge COMMAND --help lists the options that most people use, edge COMMAND --help-all every option."
    parser = Parser(prog="edge", description="Run one model on the devices you have.", epilog=words)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in (command,) if command and command in COMMANDS else COMMANDS:
        module = importlib.import_module(f"apps.commands.{name}")
        own = commands.add_parser(name, help=module.HELP, description=module.HELP)
        own.set_defaults(run=getattr(module, "run", None), parser=own)
        module.add_arguments(own)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command line (default: the arguments of this process) and return the exit code."""
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
        # The process is ending: from here on a signal would only print a traceback.
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def quiet_grpc() -> None:
    """Silence gRPC. Call this before gRPC is imported.

    The log lines of gRPC about failed connections repeat edge's own errors. Its preparation for forks is not needed.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _run(argv: list[str] | None) -> int:
    command = "edge"
    quiet_grpc()
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            if not words:
                print(BEGIN)
                return 0
            args = build_parser(*words[:1]).parse_args(words)
            command = args.parser.prog
            code: int = args.run(args)
        finally:  # also after --help, and before an error is printed
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the program that reads this output has ended
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
        return f"unexpected {type(error).__name__}: {text} (EDGE_DEBUG=1 prints the traceback; please report it)"
    return text


class _Version(argparse.Action):
    """Prints the version. Looking it up takes as long as the rest of --help, so that happens only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from edge.version import version

        print(f"edge {version('edge-runtime')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
