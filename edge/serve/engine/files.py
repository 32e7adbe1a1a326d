"""Files of pictures and sounds in requests: decoded from base64, or fetched where that is allowed."""

from __future__ import annotations

import base64
import binascii
import http.client
import time
import urllib.request

from edge.errors import MediaError
from edge.multimodal.decoding import MOST_BYTES

_FETCH_S = 20.0  # for a file, and between two parts of it
_PART = 1 << 16


def file_of(source: str, fetches: bool) -> bytes:
    """Return the bytes of a file. source: base64, or a URL. MediaError where it is neither, or is not fetched."""
    if ":" not in source:
        try:
            return base64.b64decode(source, validate=True)
        except (binascii.Error, ValueError):
            raise MediaError("a picture or sound is no base64") from None
    if not source.startswith(("http://", "https://")):
        raise MediaError(f"{source[:40]!r} is no picture: send it as data:image/png;base64,...")
    if not fetches:
        raise MediaError(
            "this server fetches nothing from URLs: send the picture as data:image/png;base64,..., or serve with"
            " --media-urls"
        )
    deadline, data = time.monotonic() + _FETCH_S, b""
    try:
        with urllib.request.urlopen(source, timeout=_FETCH_S) as response:
            while len(data) <= MOST_BYTES and (part := response.read1(_PART)):
                data += part
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes more than {_FETCH_S:g} s")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MediaError(f"{source[:200]}: cannot be fetched: {error}") from None
    return data
