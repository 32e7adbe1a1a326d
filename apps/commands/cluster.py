"""`edge cluster`: the devices that trust each other, as their owner manages them."""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
from typing import TYPE_CHECKING

from apps.options import device_name
from apps.show.table import print_table

if TYPE_CHECKING:
    from devices.trust.authority import Authority

HELP = "Manage the devices that trust each other: make a cluster, invite devices to it, revoke them."

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LEAST_S, _MOST_S = 60, 30 * 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser("init", help="make a cluster, owned by this machine")
    init.add_argument("--name", type=device_name, metavar="NAME", help="of this machine (default: its host name)")
    invite = actions.add_parser("invite", help="print a token by which one device can join")
    invite.add_argument("name", type=device_name, metavar="NAME", help="of the device, as you want to call it")
    invite.add_argument(
        "--expires", type=_lifetime, default=3600, metavar="T", help="90s, 15m, 1h, 2d: to join within (default: 1h)"
    )
    revoke = actions.add_parser("revoke", help="refuse a device from now on, or withdraw its invitation")
    revoke.add_argument("name", metavar="NAME", help="of the device")
    listing = actions.add_parser("list", help="who was invited, joined, expired or revoked, and when")
    for action in (init, invite, revoke, listing):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return {"init": _init, "invite": _invite, "revoke": _revoke, "list": _list}[args.action](args)


def _lifetime(text: str) -> int:
    """Seconds, from "90s", "15m", "1h" or "2d"."""
    match = re.fullmatch(r"([0-9]{1,7})([smhd])", text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"needs a time from 60s to 30d, such as 15m or 1h, got {text!r}")
    return seconds


def _init(args: argparse.Namespace) -> int:
    from devices.names import name_from
    from devices.paths import authority_folder, credentials_folder
    from devices.trust.authority import Authority

    name = args.name or name_from(socket.gethostname().partition(".")[0])
    authority = Authority.create(authority_folder(), name, credentials_folder())
    if args.json:
        print(json.dumps({"cluster": authority.fingerprint, "owner": name, "folder": str(authority.folder)}))
        return 0
    print(f"cluster {authority.fingerprint}, owned by {name}")
    print(
        f"Keep {authority.folder} to yourself: whoever has it decides who may take part.\n"
        "Next: edge cluster invite NAME, for each device that is to join.",
        file=sys.stderr,
    )
    return 0


def _invite(args: argparse.Namespace) -> int:
    now = time.time()
    token = _authority().invite(args.name, args.expires, now)
    expires = int(now + args.expires)
    if args.json:
        print(json.dumps({"name": args.name, "token": token, "expires": _utc(expires)}))
        return 0
    print(token)
    print(
        f"On {args.name}, before {_local(expires)}: edge worker --join TOKEN\n"
        "The token lets in whoever uses it first, once. Send it only where nobody else reads.",
        file=sys.stderr,
    )
    return 0


def _revoke(args: argparse.Namespace) -> int:
    authority = _authority()
    fresh = authority.revoke(args.name)
    if args.json:
        print(json.dumps({"name": args.name, "state": "revoked", "changed": fresh}))
    elif fresh:
        print(
            f"{args.name} is revoked: this machine refuses it now, others once this machine reaches them (edge devices)"
        )
    else:
        print(f"{args.name} was revoked before; nothing changed")
    return 0


def _list(args: argparse.Namespace) -> int:
    authority = _authority()
    members = authority.members()
    if args.json:
        entries = [
            {"name": m.name, "role": m.role, "state": m.state, "since": _utc(m.since), "expires": _utc(m.expires)}
            for m in members
        ]
        print(json.dumps({"cluster": authority.fingerprint, "members": entries}))
        return 0
    rows = []
    for member in members:
        # What matters next: an invitation's end. A certificate's is ten years away.
        when = f"expires {_local(member.expires)}" if member.state == "invited" else f"since {_local(member.since)}"
        if member.state == "expired":
            when = f"since {_local(member.expires)}"
        rows.append((member.name, f"{member.role}, {member.state}, {when}"))
    print_table(f"cluster {authority.fingerprint}", rows)
    return 0


def _authority() -> Authority:
    from devices.paths import authority_folder, credentials_folder
    from devices.trust.authority import Authority

    return Authority.open(authority_folder(), credentials_folder())


def _utc(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


def _local(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
