"""`edge lab`: emulates a cluster on this machine, to try edge without several devices."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.options import add, add_action
from apps.show.progress import progress
from apps.show.table import print_columns, print_json, print_note
from quant.text import bytes_text

if TYPE_CHECKING:
    from devices.lab.lab import LabState

HELP = "Emulate a cluster on this machine: workers with limited cores and memory, links with delays."
COLUMNS = ("name", "address", "cores", "memory", "state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = add_action(actions, "up", "start the devices of a lab file, and leave them running")
    words = "description of the lab, such as docs/example-lab.toml (default: three devices on a home network)"
    up.add_argument("file", type=Path, nargs="?", metavar="FILE", help=words)
    words = "run an edge command as a device of the lab, with that device's network and emulated speed"
    inside = add_action(actions, "run", words)
    inside.add_argument("device", metavar="DEVICE", help="name of the device in the lab file")
    inside.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="-- ARGUMENT ...", help="command of `edge`, such as chat"
    )
    inside.set_defaults(run=_run)
    down = add_action(actions, "down", "stop the lab, and remove everything it created")
    status = add_action(actions, "status", "show the devices of the lab, their addresses and state")
    for action, run in ((up, _up), (down, _down), (status, _status)):
        add(action, "--json")
        action.set_defaults(run=run)


def _up(args: argparse.Namespace) -> int:
    from devices.lab.config import THREE_DEVICES, read_lab
    from devices.lab.lab import up

    config = read_lab(args.file or THREE_DEVICES)
    with progress("Starting workers", len(config.devices), "workers") as show:
        state = up(config, lambda n, name: show(n, what=name))
    _show(state, args.json)
    return 0


def _down(args: argparse.Namespace) -> int:
    from devices.lab.lab import down

    was_up = down()
    if args.json:
        return print_json({"was_up": was_up})
    print("the lab is down" if was_up else "no lab was up")
    return 0


def _run(args: argparse.Namespace) -> int:
    from devices.errors import LabError
    from devices.lab.lab import status
    from devices.processes.interpreter import module_command

    state = status()
    if state is None:
        raise LabError("no lab is up; start one with edge lab up")
    if args.device not in state.addresses:
        raise LabError(f"the lab has no device {args.device!r:.80}; it has {', '.join(state.addresses)}")
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    command = state.command(args.device, module_command("apps.cli", *arguments))
    os.execvp(command[0], command)


def _status(args: argparse.Namespace) -> int:
    from devices.lab.lab import status

    state = status()
    if state is not None:
        _show(state, args.json)
    elif args.json:
        print_json({"up": False})
    else:
        print("no lab is up; start one with edge lab up")
    return 0


def _show(state: LabState, as_json: bool) -> None:
    # Options that use all devices. A shaped network is not loopback, so its workers in the clear need --insecure.
    options = ["--workers", ",".join(state.addresses.values()), *(["--insecure"] if state.shaped else [])]
    if as_json:
        print_json({"up": True, **state.to_json(), "options": options})
        return
    print_columns(COLUMNS, [_row(device) for device in state.to_json()["devices"]], whole=("name", "address"))
    for note in state.not_enforced:
        print_note(f"not enforced{': ' + note['device'] if note['device'] else ''}: {note['what']}: {note['why']}")
    options[1] = ",".join(state.addresses)
    again = f"edge chat {' '.join(options)} --parallel pipeline"
    print(f"Next: {again}, which uses every device; finally edge lab down.", file=sys.stderr)


def _row(device: dict[str, Any]) -> tuple[str, ...]:
    cores, memory = device["cpu"], device["memory_bytes"]
    return (
        device["name"],
        device["address"],
        "all" if cores is None else f"{cores:g}",
        "all" if memory is None else bytes_text(memory),
        "runs" if device["running"] else f"ended, see {device['log']}",
    )
