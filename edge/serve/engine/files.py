"""Files of pictures and sounds in requests: decoded from base64, or fetched where that is allowed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping

from edge.api.config import MediaUrls
from edge.errors import MediaError
from edge.serve.engine.downloads import Downloads


def files_of(sources: Mapping[str, str], urls: MediaUrls) -> Iterator[tuple[str, bytes]]:
    """Yield files with their marks, one at a time. sources: base64 or a URL, by mark. MediaError where one is neither,
    or is not fetched."""
    downloads = Downloads(urls)
    for mark, source in sources.items():
        yield mark, _file_of(source, downloads)


def _file_of(source: str, downloads: Downloads) -> bytes:
    if source.startswith(("http://", "https://")):
        return downloads.get(source)
    if ":" in source:
        raise MediaError(f"{source[:40]!r} is no picture: send it as data:image/png;base64,...")
    try:
        return base64.b64decode("".join(source.split()), validate=True)  # in lines, as MIME has it
    except (binascii.Error, ValueError):
        raise MediaError("a picture or sound is no base64") from None
