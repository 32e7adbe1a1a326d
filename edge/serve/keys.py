"""API keys of a server: the owners of requests, and their rights."""

from __future__ import annotations

import hashlib
import hmac
import re

from edge.serve.caller import Caller
from edge.serve.options import ServeOptions

NEEDED = "a key of this server is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`"


class Keys:
    """Keys of a server, for any protocol."""

    def __init__(self, options: ServeOptions) -> None:
        self._owners = {key.encode(): _digest(key) for key in options.keys}
        self._weights = {_digest(key): weight for key, weight in options.weights.items()}
        self._administrators = frozenset(map(_digest, options.administrators)) if options.keys else frozenset({""})

    def owner(self, authorization: str, *others: str) -> str | None:
        """Return the digest of the key in a request, or None if no key matches.

        All keys are compared, each in constant time.

        authorization: value of the header Authorization.
        others: values of other headers that may have the key.
        """
        # Some clients leave out the word Bearer.
        bearer = re.sub("^bearer( +|$)", "", authorization.strip(), flags=re.IGNORECASE)
        equal = [
            owner
            for key, owner in self._owners.items()
            for given_key in (bearer, *others)
            if hmac.compare_digest(given_key.encode(), key)
        ]
        return equal[0] if equal else None if self._owners else ""

    def caller(self, owner: str, address: str) -> Caller:
        """Return the caller of a request. address: the client's address."""
        weight, is_administrator = self._weights.get(owner, 1.0), owner in self._administrators
        return Caller(owner, owner or address, is_administrator, weight, len(self._owners) > 1)


def _digest(key: str) -> str:
    """Return a digest that identifies the key without revealing it."""
    return hashlib.sha256(f"edge prefixes of {key}".encode()).hexdigest()
