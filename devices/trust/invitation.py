"""Invitation token: one line of text with all that is needed to trust a new device, once.

`edge1.` and base64url of: the cluster's certificate and the invitation's, each behind its length in two bytes; the
invitation's private scalar in 32 bytes; and four bytes of SHA-256 over all that. The checksum is for slips of the hand.
What makes a token worth anything is the signature of the cluster inside.
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
MAX_TOKEN = 4096  # characters; a real one has some 1,350
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
        """Device that the invitation is for, and when it expires."""
        return certificates.holder(self.certificate)

    def token(self) -> str:
        """The one line."""
        parts = [certificates.to_der(self.authority), certificates.to_der(self.certificate)]
        body = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
        body += self.key.private_numbers().private_value.to_bytes(_SCALAR, "big")
        body += sha256(body).digest()[:_CHECKSUM]
        return PREFIX + base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def parse_token(text: str) -> Invitation:
    """The invitation in a token, its signatures checked; dates are not. TrustError says what is wrong with the text."""
    if len(text) > MAX_TOKEN:
        raise TrustError(f"a token has at most {MAX_TOKEN} characters, this text has {len(text)}")
    text = "".join(text.split())  # terminals break long lines when they are copied
    if not text.startswith(PREFIX):
        raise TrustError(f"this is no token: one begins with {PREFIX!r}; copy the line `edge cluster invite` printed")
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
    """The two certificates and the scalar; nothing may be missing or left over."""
    parts = []
    for _ in range(2):
        length = int.from_bytes(content[:2], "big")
        parts.append(content[2 : 2 + length])
        content = content[2 + length :]
    if len(content) != _SCALAR:
        raise TrustError("the token is forged: its parts have wrong lengths")
    return [*parts, content]
