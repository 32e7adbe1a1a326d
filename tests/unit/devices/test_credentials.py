"""Test a member's side: tokens (also arbitrary text), joining, installing a certificate, and revocation lists."""

import base64
import stat
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.errors import TrustError
from devices.trust import certificates, credentials
from devices.trust.credentials import Membership
from devices.trust.invitation import MAX_TOKEN, PREFIX, Invitation, parse_token
from tests.support.trust import HOUR_S, Cluster, membership_in

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"), NOW)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("other"), NOW)


@pytest.fixture(scope="module")
def token(cluster: Cluster) -> str:
    return cluster.authority.invite("fuzzed", HOUR_S, NOW)


def content(invitation: Invitation) -> tuple[bytes, bytes, bytes]:
    key = certificates.key_to_pem(invitation.key)
    return certificates.to_der(invitation.authority), certificates.to_der(invitation.certificate), key


def sealed(body: bytes) -> str:
    """A token whose checksum fits whatever is inside: made by malice, not by a slip."""
    return PREFIX + base64.urlsafe_b64encode(body + sha256(body).digest()[:4]).rstrip(b"=").decode()


def opened(token: str) -> bytes:
    return base64.urlsafe_b64decode(token[len(PREFIX) :] + "==")[:-4]


# Tokens.


def test_a_token_is_one_short_line_that_holds_everything(cluster: Cluster, token: str) -> None:
    assert len(token) < 1500
    assert set(token[len(PREFIX) :]) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    invitation = parse_token(token)
    assert certificates.to_pem(invitation.authority) == cluster.authority.pem
    assert (invitation.holder.name, invitation.holder.role) == ("fuzzed", "invited")
    assert invitation.holder.expires == NOW + HOUR_S
    assert invitation.token() == token
    assert "key" not in repr(invitation)


def test_white_space_from_copying_is_harmless(token: str) -> None:
    broken = "  " + "\n".join(token[i : i + 80] for i in range(0, len(token), 80)) + "\n"
    assert content(parse_token(broken)) == content(parse_token(token))


@pytest.mark.parametrize("cut", [0, 3, 6, 7, 100, -1, -5])
def test_a_token_that_was_cut_off(token: str, cut: int) -> None:
    with pytest.raises(TrustError, match="not a token" if 0 <= cut < 6 else "cut off or mistyped"):
        parse_token(token[:cut])


def test_what_is_much_too_long_is_not_even_read() -> None:
    with pytest.raises(TrustError, match="at most 4096 characters"):
        parse_token(PREFIX + "A" * MAX_TOKEN)


@given(text=st.text() | st.text().map(PREFIX.__add__))
def test_any_text_is_a_token_or_an_error(text: str) -> None:
    with pytest.raises(TrustError):
        parse_token(text)


@given(data=st.data())
def test_a_mistyped_token_is_the_same_or_an_error(token: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(token)), "start")
    end = data.draw(st.integers(start, min(len(token), start + 8)), "end")
    typed = token[:start] + data.draw(st.text(max_size=8) | st.text("AB-_= \n", max_size=8), "typed") + token[end:]
    try:
        result = parse_token(typed)
    except TrustError:
        return
    assert content(result) == content(parse_token(token))


@given(data=st.data())
def test_a_forged_token_is_the_same_or_an_error(token: str, data: st.DataObject) -> None:
    body = bytearray(opened(token))
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        body[data.draw(st.integers(0, len(body) - 1), "at")] = data.draw(st.integers(0, 255), "byte")
    try:
        result = parse_token(sealed(bytes(body)))
    except TrustError:
        return
    assert content(result) == content(parse_token(token))


def test_a_certificate_is_written_in_one_way(cluster: Cluster) -> None:
    """The last bit of the signature, if it is 0, may be said not to count: to some readers that is the same one."""
    tokens = (opened(cluster.authority.invite("fuzzed", HOUR_S, NOW)) for _ in range(64))
    body = bytearray(next(body for body in tokens if body[-33] % 2 == 0))
    signature = parse_token(sealed(bytes(body))).certificate.signature
    body[-33 - len(signature)] = 1
    with pytest.raises(TrustError, match="not in the canonical form"):
        parse_token(sealed(bytes(body)))


@given(body=st.binary(max_size=200))
def test_any_bytes_with_a_fitting_checksum(body: bytes) -> None:
    with pytest.raises(TrustError):
        parse_token(sealed(body))


def test_parts_of_different_tokens(cluster: Cluster, other: Cluster, token: str) -> None:
    ours, theirs = parse_token(token), parse_token(other.authority.invite("fuzzed", HOUR_S, NOW))
    owner = certificates.from_pem(cluster.owner.certificate)
    for forged, why in (
        (Invitation(ours.authority, theirs.certificate, theirs.key), "not signed by the cluster"),
        (Invitation(ours.authority, ours.certificate, theirs.key), "do not belong together"),
        (Invitation(owner, ours.certificate, ours.key), "cannot be used|not signed by the cluster"),
        (Invitation(ours.authority, owner, certificates.key_from_pem(cluster.owner.key)), "do not belong together"),
        (Invitation(ours.authority, ours.authority, ours.key), "names no device|cannot be used"),
    ):
        with pytest.raises(TrustError, match=why):
            parse_token(forged.token())


@pytest.mark.parametrize("serial", [b"\x80", b"\x00"])
def test_a_serial_that_is_no_number_of_ours(token: str, serial: bytes) -> None:
    invitation = parse_token(token)
    der = certificates.to_der(invitation.certificate)
    number = invitation.certificate.serial_number.to_bytes(20, "big").lstrip(b"\0")
    at = der.index(number)
    forged = opened(token).replace(der, der[:at] + serial + der[at + 1 :])
    with pytest.raises(TrustError):
        parse_token(sealed(forged))


@pytest.mark.parametrize("scalar", [b"\0" * 32, b"\xff" * 32])
def test_a_scalar_that_is_no_key(token: str, scalar: bytes) -> None:
    with pytest.raises(TrustError, match="private key cannot be used"):
        parse_token(sealed(opened(token)[:-32] + scalar))


# Joining.


def test_joining_stores_what_the_token_holds(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "pi"
    assert credentials.load(folder) is None
    token = cluster.authority.invite("joins", HOUR_S, NOW)
    credentials.store_token(folder, token, NOW)
    membership = membership_in(folder)
    assert (membership.holder.name, membership.holder.role, membership.crl) == ("joins", "invited", None)
    assert membership.fingerprint == cluster.authority.fingerprint
    assert stat.S_IMODE((folder / "device.pem").stat().st_mode) == 0o600
    assert "PRIVATE" not in repr(membership)


def test_the_same_token_again_is_fine_also_later(cluster: Cluster, tmp_path: Path) -> None:
    token = cluster.authority.invite("again", HOUR_S, NOW)
    credentials.store_token(tmp_path, token, NOW)
    csr = credentials.pending_csr(tmp_path, "again")
    credentials.install(tmp_path, cluster.authority.enroll(membership_in(tmp_path).certificate, csr, NOW), NOW)
    before = membership_in(tmp_path)
    credentials.store_token(tmp_path, token, NOW + 1000 * HOUR_S)  # as at every start of a service
    assert membership_in(tmp_path) == before
    assert before.holder.role == "worker"


def test_an_expired_token(cluster: Cluster, tmp_path: Path) -> None:
    token = cluster.authority.invite("late", HOUR_S, NOW)
    for late_s, ago in ((0, "0 s"), (150, "2 min"), (3 * HOUR_S, "3 h"), (80 * HOUR_S, "3 days")):
        with pytest.raises(TrustError, match=f"expired {ago} ago, by this device's clock.*edge cluster invite late"):
            credentials.store_token(tmp_path, token, NOW + HOUR_S + late_s)
    assert credentials.load(tmp_path) is None


def test_a_later_token_of_the_same_cluster_replaces(cluster: Cluster) -> None:
    first = cluster.joined("moves")
    cluster.authority.revoke("moves", NOW)
    credentials.update_crl(cluster.at("moves"), cluster.authority.crl())
    second = cluster.invited("moves")
    assert second.holder.role == "invited"
    assert first.holder.serial in second.revoked  # what it knew of revocations stays


def test_a_member_of_another_cluster_is_told_what_to_delete(cluster: Cluster, other: Cluster) -> None:
    before = cluster.joined("faithful")
    token = other.authority.invite("faithful", HOUR_S, NOW)
    with pytest.raises(TrustError, match=f"in another cluster; to leave that one, delete {cluster.at('faithful')}"):
        credentials.store_token(cluster.at("faithful"), token, NOW)
    assert membership_in(cluster.at("faithful")) == before


def test_the_owner_does_not_join_itself(cluster: Cluster, token: str) -> None:
    with pytest.raises(TrustError, match="owns the cluster"):
        credentials.store_token(cluster.at("desk"), token, NOW)


# Installing.


def test_only_our_own_certificate_is_installed(cluster: Cluster, other: Cluster) -> None:
    before = cluster.invited("picky")
    csr = credentials.pending_csr(cluster.at("picky"), "picky")
    pending = cluster.at("picky") / credentials.PENDING_FILE
    key, other_key = pending.read_bytes(), certificates.key_to_pem(certificates.new_key())
    good = cluster.authority.enroll(before.certificate, csr, NOW)
    foreign = other.authority.enroll(other.invited("picky").certificate, csr, NOW)
    for certificate, with_key, when, why in (
        (foreign, key, NOW, "another cluster"),
        (cluster.joined("else").certificate, key, NOW, "for the worker else"),
        (cluster.owner.certificate, key, NOW, "for the owner desk"),
        (before.certificate, before.key, NOW, "for the invited picky"),
        (good, other_key, NOW, "not for the key"),
        (good, key, NOW + 1e9, "expired"),
        (b"", key, NOW, "cannot be used"),
        (good, b"", NOW, "cannot be used"),
    ):
        pending.write_bytes(with_key)
        with pytest.raises(TrustError, match=why):
            credentials.install(cluster.at("picky"), certificate, when)
        assert membership_in(cluster.at("picky")) == before
    pending.write_bytes(key)
    assert credentials.install(cluster.at("picky"), good, NOW).holder.role == "worker"


def test_a_crash_while_installing_leaves_the_old_pair(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cluster.invited("crashes")
    csr = credentials.pending_csr(cluster.at("crashes"), "crashes")
    certificate = cluster.authority.enroll(before.certificate, csr, NOW)

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="No space"):
        credentials.install(cluster.at("crashes"), certificate, NOW)
    monkeypatch.undo()
    assert membership_in(cluster.at("crashes")) == before
    assert sorted(path.name for path in cluster.at("crashes").iterdir()) == [".lock", "device.pem", "pending.pem"]


def test_a_key_of_an_earlier_membership_is_not_used_for_another(cluster: Cluster) -> None:
    """The owner may invite a device anew because others had its files."""
    first = cluster.invited("back")
    csr = credentials.pending_csr(cluster.at("back"), "back")
    certificate = cluster.authority.enroll(first.certificate, csr, NOW)
    cluster.authority.revoke("back", NOW)
    again = cluster.invited("back")
    with pytest.raises(TrustError, match="without a pending request"):
        credentials.install(cluster.at("back"), certificate, NOW)
    anew = credentials.pending_csr(cluster.at("back"), "back")
    assert not certificates.same_key(certificates.from_pem(certificate), certificates.key_of_request(anew))
    credentials.install(cluster.at("back"), cluster.authority.enroll(again.certificate, anew, NOW), NOW)


def test_nothing_to_install_into(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="in no cluster"):
        credentials.install(tmp_path, b"", NOW)
    with pytest.raises(TrustError, match="in no cluster"):
        credentials.update_crl(tmp_path, cluster.authority.crl())


# Lists of revoked certificates.


def test_newer_lists_are_kept_and_older_ones_are_not(cluster: Cluster) -> None:
    cluster.joined("reader")
    gone = cluster.joined("gone")
    old = cluster.authority.crl()
    credentials.update_crl(cluster.at("reader"), old)
    cluster.authority.revoke("gone", NOW)
    new = cluster.authority.crl()
    for _ in range(2):  # the same list twice is fine
        assert gone.holder.serial in credentials.update_crl(cluster.at("reader"), new).revoked
    assert credentials.update_crl(cluster.at("reader"), old).crl == new
    assert membership_in(cluster.at("reader")).crl == new


def test_no_list_takes_a_revocation_back(cluster: Cluster, other: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number is; and where nothing changes, nothing is written."""
    cluster.joined("firm")
    authority = cluster.authority

    def numbered(number: int, *serials: int) -> bytes:
        return certificates.make_crl(authority.certificate, authority._key, number, dict.fromkeys(serials, NOW), NOW)

    saved = numbered(50, 7, 8)
    assert credentials.update_crl(cluster.at("firm"), saved).revoked == {7, 8}
    monkeypatch.setattr(credentials, "write_private", lambda *_: pytest.fail("written"))
    for crl in (saved, numbered(50, 7, 8), numbered(50, 7), numbered(50, 7, 8, 9), numbered(49, 7, 8), numbered(51, 7)):
        assert credentials.update_crl(cluster.at("firm"), crl).crl == saved
    monkeypatch.undo()
    assert credentials.update_crl(cluster.at("firm"), numbered(51, 7, 8, 9)).revoked == {7, 8, 9}


def test_a_list_that_others_signed_is_refused(cluster: Cluster, other: Cluster) -> None:
    cluster.joined("wary")
    ca, forger = cluster.authority.certificate, certificates.new_key()
    forged = certificates.make_crl(ca, forger, 1000, {}, NOW)  # the right issuer's name, another key
    for crl in (other.authority.crl(), forged, b"", b"x" * 10_000, b"\xff" * ((1 << 20) + 1)):
        with pytest.raises(TrustError, match="list of revoked"):
            credentials.update_crl(cluster.at("wary"), crl)
    assert membership_in(cluster.at("wary")).crl is None


# Files.


def damaged_files(membership: Membership, foreign: Membership) -> list[bytes]:
    key, own, authority = membership.key, membership.certificate, membership.authority
    return [
        b"",
        b"nonsense",
        key,
        key + own,
        own + authority + key,
        foreign.key + own + authority,
        key + own + foreign.authority,
        key + authority + own,
        (key + own + authority)[:-60],
        (key + own + authority).replace(b"M", b"N", 1),
    ]


def test_damaged_files_are_an_error_that_says_what_to_delete(cluster: Cluster, other: Cluster, tmp_path: Path) -> None:
    for device in damaged_files(cluster.joined("worn"), other.owner):
        (tmp_path / "device.pem").write_bytes(device)
        with pytest.raises(TrustError, match=f"delete {tmp_path} and join again"):
            credentials.load(tmp_path)


def test_a_damaged_list_is_not_taken_for_an_empty_one(cluster: Cluster) -> None:
    cluster.joined("listed")
    (cluster.at("listed") / "revoked.pem").write_bytes(b"")
    with pytest.raises(TrustError, match="join again"):
        credentials.load(cluster.at("listed"))
