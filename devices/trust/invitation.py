"""Invitation token: one line of text that lets one device join a cluster once.

It is `edge1.` and the base64url of these parts: the cluster's certificate and the invitation's certificate, each after
its length in two bytes; the invitation's private scalar in 32 bytes; four bytes of SHA-256 of all that. The checksum
detects mistyped tokens. The cluster's signature protects against forged ones.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from hashlib import sha256

from cryptography import x509

from devices.errors import TrustError
from devices.trust import certificates
from devices.trust.certificates import INVITED, Holder, PrivateKey

PREFIX = "edge1."
MAX_TOKEN = 4096  # characters; a real token has about 1,350
_SCALAR, _CHECKSUM = 32, 4
_BODY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Invitation:
    """Content of a token."""

    authority: x509.Certificate
    certificate: x509.Certificate
    key: PrivateKey = field(repr=False)

    @property
    def holder(self) -> Holder:
        """Device that the invitation is for, and the time when it expires."""
        return certificates.holder(self.certificate)

    def token(self) -> str:
        """Return the token."""
        parts = [certificates.to_der(self.authority), certificates.to_der(self.certificate)]
        body = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
        body += self.key.private_numbers().private_value.to_bytes(_SCALAR, "big")
        body += sha256(body).digest()[:_CHECKSUM]
        return PREFIX + base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def parse_token(text: str) -> Invitation:
    """Return the invitation in a token. Signatures are checked, dates are not. Raises TrustError if it is not valid."""
    if len(text) > MAX_TOKEN:
        raise TrustError(f"a token has at most {MAX_TOKEN} characters, this text has {len(text)}; copy only the token")
    text = "".join(text.split())  # terminals break long lines when they are copied
    if not text.startswith(PREFIX):
        raise TrustError(f"this is not a token: it must begin with {PREFIX!r}; copy the line of `edge cluster invite`")
    authority_der, certificate_der, scalar = _split(_decode(text[len(PREFIX) :]))
    authority, certificate = certificates.from_der(authority_der), certificates.from_der(certificate_der)
    key = certificates.key_from_number(int.from_bytes(scalar, "big"))
    if not certificates.is_authority(authority) or not certificates.is_issued_by(certificate, authority):
        raise TrustError("the token is forged: its invitation is not signed by the cluster it names")
    if certificates.holder(certificate).role != INVITED or not certificates.same_key(certificate, key.public_key()):
        raise TrustError("the token is forged: its parts do not belong together")
    return Invitation(authority, certificate, key)


def _decode(body: str) -> bytes:
    damaged = TrustError("the token is cut off or mistyped; copy the whole line that `edge cluster invite` printed")
    if _BODY.fullmatch(body) is None:
        raise damaged
    try:
        content = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        raise damaged from None
    if sha256(content[:-_CHECKSUM]).digest()[:_CHECKSUM] != content[-_CHECKSUM:]:
        raise damaged
    return content[:-_CHECKSUM]


def _split(content: bytes) -> list[bytes]:
    """Return the two certificates and the scalar. Raises TrustError if bytes are missing or left over."""
    parts = []
    for _ in range(2):
        length = int.from_bytes(content[:2], "big")
        parts.append(content[2 : 2 + length])
        content = content[2 + length :]
    if len(content) != _SCALAR:
        raise TrustError("the token is forged: its parts have wrong lengths")
    return [*parts, content]
