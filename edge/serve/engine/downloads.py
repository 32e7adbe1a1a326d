"""Files of pictures and sounds in requests, decoded from base64 or fetched from URLs.

Fetching must be allowed by the server's options, and is limited in bytes, time and redirects.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import SplitResult, quote, urljoin, urlsplit, urlunsplit

from edge.api.config import MediaUrls
from edge.errors import MediaError
from edge.media.decoding import MOST_BYTES
from edge.serve.engine.threads import is_url

TOTAL_S = 20.0  # total time for all files of a request
MOST_REDIRECTS = 5
_LOOK_S = 0.25  # interval of checks whether the client is still connected
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "edge", "Accept": "image/*, audio/*", "Connection": "close"}


class Downloads:
    """Fetches the files of one request."""

    def __init__(self, urls: MediaUrls, given_up: Callable[[], bool] = lambda: False) -> None:
        """given_up: returns True if the client has disconnected."""
        self._urls, self._left_s, self._given_up = urls, TOTAL_S, given_up

    def get(self, url: str) -> bytes:
        """Return the bytes at a URL.

        Raises MediaError if fetching is not allowed, fails, or exceeds the remaining time.
        """
        if not self._urls:
            raise MediaError(
                "fetching from URLs is off on this server: send the picture as data:image/png;base64,..., or serve with"
                " --media-urls"
            )
        began = time.monotonic()
        try:
            return self._followed(url, began + self._left_s)
        except (OSError, ValueError, http.client.HTTPException) as error:
            late = f"fetching all files of the request took longer than {TOTAL_S:g} s"
            reason = late if time.monotonic() - began >= self._left_s else str(error)
            raise MediaError(f"{url[:200]}: cannot be fetched: {reason}") from None
        finally:
            self._left_s -= time.monotonic() - began

    def _followed(self, url: str, until: float) -> bytes:
        for _ in range(1 + MOST_REDIRECTS):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url[:200]!r} is not an http or https URL")
            with self._connected(parts, until) as connection:
                target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
                connection.request("GET", quote(target, safe=string.punctuation), headers=_HEADERS)
                with connection.getresponse() as response:
                    location = response.headers["Location"]
                    if response.status in _REDIRECTS and location:
                        url = urljoin(url, location)
                        continue
                    if response.status != 200:
                        raise ValueError(f"it answers {response.status} {response.reason}")
                    data = response.read(MOST_BYTES + 1)
                if time.monotonic() >= until or self._given_up():  # the data may be incomplete
                    raise TimeoutError("the client has disconnected")
                return data
        raise ValueError(f"it redirects more than {MOST_REDIRECTS} times")

    @contextmanager
    def _connected(self, parts: SplitResult, until: float) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection that is shut down at the deadline, or when the client has disconnected.

        The deadline holds even if the other side keeps sending small pieces.
        """
        is_tls, host = parts.scheme == "https", parts.hostname or ""
        connection = (http.client.HTTPSConnection if is_tls else http.client.HTTPConnection)(host, parts.port)
        plain = self._socket(host, connection.port, until)
        try:
            connection.sock = plain
            if is_tls:
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
            done = threading.Event()
            threading.Thread(target=self._watch, args=(connection.sock, done, until), daemon=True).start()
            try:
                if isinstance(connection.sock, ssl.SSLSocket):
                    connection.sock.do_handshake()
                yield connection
            finally:
                done.set()
        finally:
            connection.close()

    def _watch(self, connected: socket.socket, done: threading.Event, until: float) -> None:
        while (left_s := until - time.monotonic()) > 0 and not self._given_up():
            if done.wait(min(left_s, _LOOK_S)):
                return
        _shut_down(connected)

    def _socket(self, host: str, port: int, until: float) -> socket.socket:
        """Connect to an allowed address of a host.

        The check applies to the address instead of the name, because any public name may resolve to a local address.
        """
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        allowed = [address for address in addresses if self._urls == "all" or is_public(address)]
        problem: Exception = ValueError(
            f"{host} is in this server's local network; --media-urls all allows such addresses, for every client"
        )
        for address in allowed:
            try:
                return socket.create_connection((address, port), max(0.01, until - time.monotonic()))
            except OSError as error:
                problem = error
        raise problem


def _shut_down(connected: socket.socket) -> None:
    try:
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # for TLS, too, without its closing messages
    except OSError:
        return  # it is already closed


def is_public(address: str) -> bool:
    """Return True if an address belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    return ip.is_global and not ip.is_multicast and (ip.version == 4 or ip in _GLOBAL_UNICAST)


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # other IPv6 ranges are site addresses or embed IPv4 addresses


def files_of(
    sources: Mapping[str, str], urls: MediaUrls, given_up: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, bytes | MediaError]]:
    """Yield files with their marks, one at a time.

    sources: base64 or URL, by mark. A file that is invalid or cannot be fetched is replaced by its error.
    """
    downloads = Downloads(urls, given_up)
    for mark, source in sources.items():
        try:
            yield mark, _file_of(source, downloads)
        except MediaError as error:
            yield mark, error


def _file_of(source: str, downloads: Downloads) -> bytes:
    if is_url(source):
        return downloads.get(source)
    if ":" in source:
        raise MediaError(f"{source[:40]!r} is not a picture: send it as data:image/png;base64,...")
    try:
        return base64.b64decode("".join(source.split()), validate=True)  # in lines, as in MIME
    except (binascii.Error, ValueError):
        raise MediaError("a picture or sound is not valid base64") from None
