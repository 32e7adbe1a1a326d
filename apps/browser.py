"""Serving pages to browsers, for `edge worker --browser` and `edge cluster invite NAME --browser`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from apps.errors import UsageError
from apps.show.table import print_json

if TYPE_CHECKING:
    from edge.bridge.inviting import Link


def serve_browser(name: str | None, lifetime_s: float, listen: str | None, *, as_json: bool = False) -> int:
    """Serve pages until SIGTERM or Ctrl-C. Print a link for a new browser.

    name: name of the new browser; None: only browsers that have joined before, or `browser` if there is none.
    lifetime_s: seconds within which the link must be opened.
    """
    try:
        from edge.bridge.inviting import InvalidListen, serve_pages
    except ImportError as error:
        raise UsageError(f"browsers need further packages: {error}; pip install 'edge-runtime[serve]'") from None
    from edge import log
    from edge.ending import signals_are_for_the_program

    def show(link: Link | None, names: list[str], serves: bool) -> None:
        if link is None:
            print(f"serving the pages of {', '.join(names)}", file=sys.stderr, flush=True)
            return
        _print_link(link, lifetime_s, as_json=as_json)
        if serves and not as_json:
            print("Keep this command running while the device helps. Ctrl-C ends it.", file=sys.stderr, flush=True)

    log.set_up()
    with signals_are_for_the_program():
        try:
            serve_pages(name, lifetime_s, listen, show)
        except InvalidListen as error:
            raise UsageError(f"--listen: {error}") from None
    return 0


def _print_link(link: Link, lifetime_s: float, *, as_json: bool) -> None:
    """Print a link for a browser."""
    if as_json:
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + lifetime_s))
        print_json({"name": link.name, "link": link.url, "expires": expires})
        sys.stdout.flush()
        return
    print(link.url, flush=True)
    _print_code(link.url)
    warning = (
        " The browser warns that it does not know the cluster's certificate: choose to continue."
        if link.is_secure
        else ""
    )
    print(f"Open the link on {link.name}, or scan the code. It works once.{warning}", file=sys.stderr, flush=True)


def _print_code(link: str) -> None:
    """Print a QR code, if a person looks at standard error and the terminal is wide enough."""
    if not sys.stderr.isatty():
        return
    import segno

    segno.make(link, error="l").terminal(out=sys.stderr, compact=True)
