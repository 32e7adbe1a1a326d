"""Serving pages to browsers, for `edge worker --browser` and `edge cluster invite NAME --browser`."""

from __future__ import annotations

import sys
import time
from contextlib import closing

from apps.errors import UsageError
from apps.show.table import print_json

DEFAULT_LISTEN = "0.0.0.0:7443"
_LOCAL_LISTEN = "127.0.0.1:7443"  # without a cluster


def serve_browser(name: str | None, lifetime_s: float, listen: str | None, *, as_json: bool = False) -> int:
    """Serve pages until SIGTERM or Ctrl-C. Print a link for a new browser.

    name: name of the new browser; None: only browsers that have joined before, or `browser` if there is none.
    lifetime_s: seconds within which the link must be opened.
    """
    try:
        from edge.bridge.bridge import BridgeOptions, page_address, serve, shown_host
        from edge.bridge.browsers import BridgeLock, Browsers
    except ImportError as error:
        raise UsageError(f"browsers need further packages: {error}; pip install 'edge-runtime[serve]'") from None
    from devices.files import write_private
    from devices.paths import authority_folder, cache_folder, config_folder, credentials_folder
    from devices.trust.authority import Authority, is_owned
    from edge import log
    from edge.ending import signals_are_for_the_program
    from edge.net.channel import is_loopback, parse_listen

    authority = Authority.open(authority_folder(), credentials_folder()) if is_owned(authority_folder()) else None
    try:
        host, port = parse_listen(listen or "", _LOCAL_LISTEN if authority is None else DEFAULT_LISTEN)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    local = is_loopback(host)
    if authority is None and not local:
        raise UsageError(f"--listen {host}: other devices could read the traffic; run `edge cluster init` first")
    folder = config_folder() / "browsers"
    browsers = Browsers(folder)
    if name is None and not browsers.names():
        name = "browser"
    token = certificate = None
    if authority is None or local:
        token = browsers.invite(name, lifetime_s) if name else None
    else:
        token = browsers.invite(name, lifetime_s, authority.invite(name, lifetime_s)) if name else None
        certificate = folder / "web.pem"
        write_private(certificate, authority.web_certificate([shown_host(host)]))
    options = BridgeOptions(host, port, folder, cache_folder() / "browsers", certificate)

    with closing(BridgeLock(folder)) as lock:
        if not lock.is_held:
            if token is None or not lock.address:
                raise UsageError("another command serves the pages of browsers already; end that one first")
            _print_link(name, lock.address + "#" + token, lifetime_s, certificate is not None, as_json=as_json)
            return 0

        def listening(port: int) -> None:
            lock.publish(page_address(options, port))
            if token is None:
                print(f"serving the pages of {', '.join(browsers.names())}", file=sys.stderr, flush=True)
                return
            _print_link(name, lock.address + "#" + token, lifetime_s, certificate is not None, as_json=as_json)
            if not as_json:
                print("Keep this command running while the device helps. Ctrl-C ends it.", file=sys.stderr, flush=True)

        log.set_up()
        with signals_are_for_the_program():
            serve(options, listening)
    return 0


def _print_link(name: str | None, link: str, lifetime_s: float, is_secure: bool, *, as_json: bool) -> None:
    """Print a link for a browser. The token is in the fragment, which browsers do not send."""
    if as_json:
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + lifetime_s))
        print_json({"name": name, "link": link, "expires": expires})
        sys.stdout.flush()
        return
    print(link, flush=True)
    _print_code(link)
    warning = (
        " The browser warns that it does not know the cluster's certificate: choose to continue." if is_secure else ""
    )
    print(f"Open the link on {name}, or scan the code. It works once.{warning}", file=sys.stderr, flush=True)


def _print_code(link: str) -> None:
    """Print a QR code, if a person looks at standard error and the terminal is wide enough."""
    if not sys.stderr.isatty():
        return
    import segno

    segno.make(link, error="l").terminal(out=sys.stderr, compact=True)
