"""Certificates, requests and revocation lists of a cluster: creating, reading and checking them. EC P-256 throughout.

Times are Unix seconds, serials are numbers, files are PEM. A bad file raises only TrustError.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from ipaddress import ip_address

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from devices.errors import TrustError
from devices.names import is_name

OWNER, WORKER, INVITED = "owner", "worker", "invited"
ROLES = (OWNER, WORKER, INVITED)

DAY_S = 86_400
MEMBER_LIFETIME_S = 3650 * DAY_S  # long, because a certificate can be revoked
AUTHORITY_LIFETIME_S = 3 * MEMBER_LIFETIME_S  # for twenty years, members' certificates end before it does
WEB_LIFETIME_S = 397 * DAY_S  # browsers accept no longer one; a bridge makes a new one at each start
CLOCK_SKEW_S = DAY_S  # members' certificates begin a day early, because a device's clock may be behind
MAX_CRL_BYTES = 1 << 20

_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
    CryptographyDeprecationWarning,  # for serials below 1, if warnings are errors; `holder` refuses such serials anyway
)

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


@dataclass(frozen=True)
class Holder:
    """Holder of a certificate, and the times between which it is valid."""

    name: str
    role: str
    serial: int
    begins: float
    expires: float


def new_key() -> PrivateKey:
    """Return a new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: PrivateKey) -> bytes:
    """Return a key as PEM, not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(pem: bytes) -> PrivateKey:
    """Return the key in PEM text."""
    with _reading("the private key"):
        key = load_pem_private_key(pem, None)
        if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("not an EC key on P-256")
        return key


def key_from_number(number: int) -> PrivateKey:
    """Return the key with this private scalar."""
    with _reading("the private key"):
        return ec.derive_private_key(number, ec.SECP256R1())


def to_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM text."""
    return certificate.public_bytes(Encoding.PEM)


def to_der(certificate: x509.Certificate) -> bytes:
    """Return a certificate in its shortest form, DER."""
    return certificate.public_bytes(Encoding.DER)


def from_pem(pem: bytes) -> x509.Certificate:
    """Return the certificate in PEM text."""
    with _reading("the certificate"):
        return x509.load_pem_x509_certificate(pem)


def from_der(der: bytes) -> x509.Certificate:
    """Return a certificate from its canonical DER form. Other forms are refused, so each has one fingerprint."""
    with _reading("the certificate"):
        certificate = x509.load_der_x509_certificate(der)
        if der[-len(certificate.signature) - 1] != 0:  # unused bits of the last byte
            raise ValueError("its signature is not in the canonical form")
        return certificate


def same_key(certificate: x509.Certificate, key: PublicKey) -> bool:
    """Return whether a certificate is for this key."""
    with _reading("the certificate"):
        return _public_key(certificate) == key


def holder(certificate: x509.Certificate) -> Holder:
    """Return the holder of a certificate. Raises TrustError if it is not a device's certificate."""
    with _reading("the certificate"):
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        (role,) = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        if not is_name(str(name.value)) or role.value not in ROLES or certificate.serial_number < 1:
            raise ValueError("it names no device")
        begins, expires = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        return Holder(str(name.value), str(role.value), certificate.serial_number, begins, expires)


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether `authority` signed the certificate."""
    with _reading("the certificate"):
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError):  # wrong signature, or wrong name of the issuer
            return False
        return True


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether this can be a cluster's own certificate: it is self-signed and may sign others."""
    with _reading("the cluster's certificate"):
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        return basic.ca and is_issued_by(certificate, certificate)


def fingerprint(certificate: x509.Certificate) -> str:
    """Return sixteen hexadecimal digits by which users can compare two clusters."""
    return certificate.fingerprint(SHA256()).hex()[:16]


def make_authority(key: PrivateKey, now: float) -> x509.Certificate:
    """Return the self-signed certificate of a new cluster."""
    # A unique name, because TLS libraries find an issuer by name before they check its key.
    name = _name({NameOID.COMMON_NAME: f"edge cluster {secrets.token_hex(4)}"})
    # It cannot be renewed, because all members store it. It is valid from 1970, in case this clock is ahead.
    builder = _builder(name, name, key.public_key(), 0, now + AUTHORITY_LIFETIME_S)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(key, SHA256())


def make_certificate(
    authority: x509.Certificate,
    authority_key: PrivateKey,
    name: str,
    role: str,
    key: PublicKey,
    now: float,
    until: float,
) -> x509.Certificate:
    """Return a device's certificate. It ends at `until`, or with the authority's own."""
    until = min(until, authority.not_valid_after_utc.timestamp())
    subject = _name({NameOID.COMMON_NAME: name, NameOID.ORGANIZATIONAL_UNIT_NAME: role})
    serial = x509.random_serial_number()
    builder = _builder(subject, authority.subject, key, now - CLOCK_SKEW_S, until, serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    # A unique name, so that a gRPC client can insist on exactly this certificate.
    pin = x509.SubjectAlternativeName([x509.DNSName(f"serial-{serial:x}.edge")])
    builder = builder.add_extension(pin, critical=False)
    signer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer)
    return builder.add_extension(identifier, critical=False).sign(authority_key, SHA256())


def make_web_certificate(
    authority: x509.Certificate, authority_key: PrivateKey, addresses: Iterable[str], key: PublicKey, now: float
) -> x509.Certificate:
    """Return the certificate of a server for browsers. It has no role, so members accept it for nothing.

    addresses: numeric addresses of the server.
    """
    subject = _name({NameOID.COMMON_NAME: "edge on this network"})
    serial = x509.random_serial_number()
    builder = _builder(subject, authority.subject, key, now - CLOCK_SKEW_S, now + WEB_LIFETIME_S, serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    names += [x509.IPAddress(ip_address(address)) for address in addresses]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer)
    return builder.add_extension(identifier, critical=False).sign(authority_key, SHA256())


def make_request(key: PrivateKey, name: str) -> bytes:
    """Return a certificate request (PEM). It proves that its sender has the key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name({NameOID.COMMON_NAME: name}))
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def key_of_request(pem: bytes) -> PublicKey:
    """Return the public key that a request proves to be its sender's. The other fields are ignored."""
    with _reading("the request for a certificate"):
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        if not isinstance(key, PublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("its key is not on P-256")
        if not request.is_signature_valid:
            raise ValueError("its signature is wrong")
        return key


def make_crl(
    authority: x509.Certificate, key: PrivateKey, number: int, revoked: Mapping[int, float], now: float
) -> bytes:
    """Return the signed list of revoked serials with their times. A later list has a higher number."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    # The standard needs a date for the next list. It has no effect: lists are pushed, and their numbers order them.
    builder = builder.last_update(_date(now - CLOCK_SKEW_S)).next_update(_date(now + MEMBER_LIFETIME_S))
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    for serial, when in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_date(when)).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def read_crl(pem: bytes, authority: x509.Certificate) -> tuple[int, frozenset[int]]:
    """Return (number, revoked serials) of a list. Raises TrustError unless this authority signed it."""
    with _reading("the list of revoked certificates"):
        if len(pem) > MAX_CRL_BYTES:
            raise ValueError(f"{len(pem)} bytes, more than the limit of {MAX_CRL_BYTES}")
        crl = x509.load_pem_x509_crl(pem)
        if crl.issuer != authority.subject or not crl.is_signature_valid(_public_key(authority)):
            raise ValueError("this cluster's owner did not sign it")
        number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        return number, frozenset(entry.serial_number for entry in crl)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise TrustError(f"{what} cannot be used: {error}") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, begins: float, until: float, serial: int | None = None
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(_date(begins))
        .not_valid_after(_date(until))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(parts: Mapping[x509.ObjectIdentifier, str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in parts.items()])


def _date(when: float) -> datetime:
    return datetime.fromtimestamp(int(when), timezone.utc)  # certificates count whole seconds


def _public_key(certificate: x509.Certificate) -> PublicKey:
    key = certificate.public_key()
    if not isinstance(key, PublicKey):
        raise ValueError("its key is not an EC key")
    return key
