"""`edge cluster`: lets an owner manage the devices that trust each other."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from apps.options import add, add_action, device_name, option
from apps.show.table import print_json, print_table
from edge.units import parse_span

if TYPE_CHECKING:
    from devices.trust.authority import Authority

HELP = "Manage the devices that trust each other: create a cluster, invite devices, revoke them."

_lifetime = partial(parse_span, least_s=60, most_s=30 * 86_400)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = add_action(actions, "init", "create a cluster that this machine owns")
    option(init, "--name NAME", "name of this machine (default: its host name)", device_name)
    invite = add_action(actions, "invite", "print a token with which one device can join")
    invite.add_argument("name", type=device_name, metavar="NAME", help="name for the device")
    words = "time within which the device must join: 90s, 15m, 1h, 2d (default: 1h)"
    option(invite, "--expires T", words, _lifetime, default=3600)
    words = "print a link and a QR code with which a browser, such as a phone's, joins; serves its page until Ctrl-C"
    option(invite, "--browser", words, action="store_true")
    words = "address or port of the browser's page (default: 0.0.0.0:7443)"
    option(invite, "--listen HOST:PORT", words)
    revoke = add_action(actions, "revoke", "refuse a device from now on, or withdraw its invitation")
    revoke.add_argument("name", metavar="NAME", help="name of the device")
    listing = add_action(actions, "list", "list devices that were invited, joined, expired or revoked, and when")
    for action, run in ((init, _init), (invite, _invite), (revoke, _revoke), (listing, _list)):
        add(action, "--json")
        action.set_defaults(run=run)


def _init(args: argparse.Namespace) -> int:
    from devices.names import host_name
    from devices.paths import authority_folder, credentials_folder
    from devices.trust.authority import Authority

    name = args.name or host_name()
    authority = Authority.create(authority_folder(), name, credentials_folder())
    if args.json:
        return print_json({"cluster": authority.fingerprint, "owner": name, "folder": str(authority.folder)})
    print(f"cluster {authority.fingerprint}, owned by {name}")
    print(
        f"Keep {authority.folder} private: whoever has this folder can invite and revoke devices.\n"
        "Next: edge cluster invite NAME, for each device that is to join.",
        file=sys.stderr,
    )
    return 0


def _invite(args: argparse.Namespace) -> int:
    if args.browser:
        from apps.browser import serve_browser

        _authority()  # there must be a cluster
        return serve_browser(args.name, args.expires, args.listen, as_json=args.json)
    now = time.time()
    token = _authority().invite(args.name, args.expires, now)
    expires = int(now + args.expires)
    if args.json:
        return print_json({"name": args.name, "token": token, "expires": _utc(expires)})
    print(token)
    print(
        f"On {args.name}, before {_local(expires)}: edge worker --join TOKEN\n"
        "The token works once, for the first device that uses it. Send it where nobody else can read it.",
        file=sys.stderr,
    )
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from devices.paths import config_folder
    from edge.browser.browsers import Browsers

    authority = _authority()
    fresh = authority.revoke(args.name)
    Browsers(config_folder() / "browsers").forget(args.name)
    if args.json:
        print_json({"name": args.name, "state": "revoked", "changed": fresh})
    elif fresh:
        print(
            f"{args.name} is revoked: this machine refuses it now, other devices after contact with this machine"
            " (edge devices)"
        )
    else:
        print(f"{args.name} was already revoked; nothing changed")
    return 0


def _list(args: argparse.Namespace) -> int:
    authority = _authority()
    members = authority.members()
    if args.json:
        entries = [
            {"name": m.name, "role": m.role, "state": m.state, "since": _utc(m.since), "expires": _utc(m.expires)}
            for m in members
        ]
        return print_json({"cluster": authority.fingerprint, "members": entries})
    rows = []
    for member in members:
        # An invitation shows when it expires. A certificate expires only after ten years.
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
