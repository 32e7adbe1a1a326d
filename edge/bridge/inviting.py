"""Invite a browser and serve its page, for `edge worker`, `edge cluster invite` and `edge serve`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from devices.files import write_private
from devices.paths import authority_folder, cache_folder, config_folder, credentials_folder
from devices.trust.authority import Authority, is_owned
from edge.bridge.bridge import BridgeOptions, page_address, serve, shown_host
from edge.browser.browsers import BridgeLock, Browsers
from edge.errors import EdgeError
from edge.net.channel import is_loopback, parse_listen

DEFAULT_LISTEN = "0.0.0.0:7443"
_LOCAL_LISTEN = "127.0.0.1:7443"  # without a cluster


class InvalidListen(EdgeError):
    """Pages cannot be served at this address."""


@dataclass(frozen=True)
class Link:
    """Link of a page, for one new browser."""

    name: str
    url: str  # the token is in the fragment, which browsers do not send
    is_secure: bool  # the cluster's certificate secures the page


def serve_pages(
    name: str | None, lifetime_s: float, listen: str | None, show: Callable[[Link | None, list[str], bool], None]
) -> None:
    """Serve pages until a signal ends it. If another process serves them already, only invite the browser.

    name: name of the new browser; None: only browsers that have joined before, or `browser` if there is none.
    lifetime_s: seconds within which the link must be opened.
    listen: address or port of the page; None: the default.
    show: called with the link, None without a new browser; with the names of all browsers; and True if this process
    serves the pages.

    Raises InvalidListen, TrustError, OSError if the address is not available, and EdgeError if another process serves
    the pages and no browser is invited.
    """
    authority = Authority.open(authority_folder(), credentials_folder()) if is_owned(authority_folder()) else None
    try:
        host, port = parse_listen(listen or "", _LOCAL_LISTEN if authority is None else DEFAULT_LISTEN)
    except ValueError as error:
        raise InvalidListen(str(error)) from None
    local = is_loopback(host)
    if authority is None and not local:
        raise InvalidListen(f"{host}: other devices could read the traffic; run `edge cluster init` first")
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

        def link() -> Link | None:
            return None if token is None else Link(name or "", f"{lock.address}#{token}", certificate is not None)

        if not lock.is_held:
            if token is None or not lock.address:
                raise EdgeError("another command serves the pages of browsers already; end that one first")
            show(link(), browsers.names(), False)
            return

        def listening(port: int) -> None:
            lock.publish(page_address(options, port))
            show(link(), browsers.names(), True)

        serve(options, listening)
