"""Test the owner's side: inviting, enrolling and revoking; crashes and concurrent commands lose nothing."""

import json
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from devices import names, paths
from devices.errors import TrustError
from devices.trust import certificates
from devices.trust.authority import Authority
from devices.trust.invitation import parse_token
from tests.support.trust import HOUR_S, YEAR_S, Cluster, csr_for, membership_in
from transport import security

NOW = 1_800_000_000.0


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, NOW)


def reopened(cluster: Cluster, now: float = NOW) -> Authority:
    return Authority.open(cluster.authority.folder, cluster.authority.credentials_folder, now)


def states(cluster: Cluster, now: float = NOW) -> dict[str, str]:
    return {member.name: member.state for member in cluster.authority.members(now)}


def revoked(cluster: Cluster) -> frozenset[int]:
    return certificates.read_crl(cluster.authority.crl(), cluster.authority.certificate)[1]


def refused(cluster: Cluster, invitation: bytes, csr: bytes, now: float = NOW) -> str:
    with pytest.raises(TrustError) as caught:
        cluster.authority.enroll(invitation, csr, now)
    return str(caught.value)


def saved(cluster: Cluster) -> dict[Path, bytes]:
    """A backup of all of the owner's files."""
    folders = (cluster.authority.folder, cluster.authority.credentials_folder)
    return {path: path.read_bytes() for folder in folders for path in folder.iterdir()}


def restore(cluster: Cluster, backup: dict[Path, bytes]) -> None:
    for path, content in backup.items():
        path.write_bytes(content)


def test_a_new_cluster_has_its_owner_and_private_files(cluster: Cluster) -> None:
    assert states(cluster) == {"desk": "joined"}
    assert (cluster.owner.holder.name, cluster.owner.holder.role) == ("desk", "owner")
    assert cluster.owner.revoked == frozenset()
    files = [path for path in cluster.folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"ca.key", "ca.pem", "members.json", "device.pem", "revoked.pem"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(cluster.authority.folder.stat().st_mode) == 0o700


def test_certificates_are_what_tls_libraries_want(cluster: Cluster) -> None:
    certificate = x509.load_pem_x509_certificate(cluster.joined("pi").certificate)
    extensions = certificate.extensions
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} == set(usage)
    name = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert name.get_values_for_type(x509.DNSName) == [f"serial-{certificate.serial_number:x}.edge"]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_after_utc.timestamp() == NOW + 10 * YEAR_S
    assert certificate.not_valid_before_utc.timestamp() < NOW
    assert not certificates.is_authority(certificate)


def test_what_devices_and_transport_both_say_of_certificates(cluster: Cluster) -> None:
    """Neither imports the other."""
    assert (security.OWNER, security.WORKER, security.INVITED) == certificates.ROLES
    assert set(certificates.ROLES) == security.ANYONE
    pi = cluster.joined("pi")
    names = x509.load_pem_x509_certificate(pi.certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    identity = security.peer_identity(pi.certificate)
    assert names.value.get_values_for_type(x509.DNSName) == [identity.pin]
    assert (identity.name, identity.role, identity.serial, identity.expires) == (
        pi.holder.name,
        pi.holder.role,
        pi.holder.serial,
        pi.holder.expires,
    )


def test_init_twice_is_refused_with_what_is_there(cluster: Cluster) -> None:
    before = (cluster.authority.folder / "ca.key").read_bytes()
    with pytest.raises(TrustError, match="already has a cluster, owned by desk since"):
        Authority.create(cluster.authority.folder, "other", cluster.authority.credentials_folder, NOW)
    assert (cluster.authority.folder / "ca.key").read_bytes() == before


def test_a_member_of_another_cluster_does_not_become_an_owner(cluster: Cluster, tmp_path: Path) -> None:
    cluster.joined("pi")
    with pytest.raises(TrustError, match="pi in another cluster"):
        Authority.create(tmp_path / "second", "mine", cluster.at("pi"), NOW)
    assert not (tmp_path / "second" / "members.json").exists()


def test_without_a_cluster_open_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="edge cluster init"):
        Authority.open(tmp_path / "none", tmp_path / "credentials")
    assert list(tmp_path.iterdir()) == []


def test_invite_enroll_revoke(cluster: Cluster) -> None:
    cluster.invited("pi")
    assert states(cluster) == {"desk": "joined", "pi": "invited"}
    assert states(cluster, NOW + HOUR_S) == {"desk": "joined", "pi": "expired"}
    pi = cluster.joined("pi")
    assert (pi.holder.name, pi.holder.role) == ("pi", "worker")
    assert states(cluster) == {"desk": "joined", "pi": "joined"}
    assert cluster.authority.revoke("pi", NOW + 1)
    assert states(cluster) == {"desk": "joined", "pi": "revoked"}
    assert pi.holder.serial in revoked(cluster)
    assert pi.holder.serial in membership_in(cluster.at("desk")).revoked  # the owner's own list, at once
    assert not cluster.authority.revoke("pi", NOW + 2)


def test_a_name_is_free_again_once_revoked(cluster: Cluster) -> None:
    first = cluster.joined("pi")
    with pytest.raises(TrustError, match=r"pi joined on .* `edge cluster revoke pi` first"):
        cluster.authority.invite("pi", HOUR_S, NOW)
    cluster.authority.revoke("pi", NOW)
    second = cluster.joined("pi")
    assert states(cluster)["pi"] == "joined"
    assert first.holder.serial in revoked(cluster)
    assert second.holder.serial not in revoked(cluster)


def test_a_second_invitation_replaces_the_first(cluster: Cluster) -> None:
    first, second = (parse_token(cluster.authority.invite("pi", HOUR_S, NOW)) for _ in range(2))
    csr = csr_for("pi")
    assert "replaced by a newer one" in refused(cluster, certificates.to_pem(first.certificate), csr)
    assert cluster.authority.enroll(certificates.to_pem(second.certificate), csr, NOW)


def test_an_invitation_lets_one_device_in(cluster: Cluster) -> None:
    invitation = cluster.invited("pi").certificate
    first, second = csr_for("pi"), csr_for("pi")
    certificate = cluster.authority.enroll(invitation, first, NOW)
    assert "used already" in refused(cluster, invitation, second)
    # The answer was lost on its way: the same key may ask again and gets the same certificate.
    assert cluster.authority.enroll(invitation, first, NOW + 1) == certificate


def test_two_devices_with_one_token_at_the_same_time(cluster: Cluster) -> None:
    invitation = cluster.invited("pi").certificate
    requests = [csr_for("pi") for _ in range(4)]

    def enroll(csr: bytes) -> bool:
        try:
            return bool(reopened(cluster).enroll(invitation, csr, NOW))
        except TrustError:
            return False

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(enroll, requests)) == [False, False, False, True]


def test_changes_at_the_same_time_lose_nothing(cluster: Cluster) -> None:
    devices = [f"pi-{i}" for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: reopened(cluster).invite(name, HOUR_S, NOW), devices))
        list(pool.map(lambda name: reopened(cluster).revoke(name, NOW), devices[:4]))
    assert list(states(cluster).values()) == ["joined"] + ["revoked"] * 4 + ["invited"] * 4
    assert len(revoked(cluster)) == 4


def test_who_may_not_enroll(cluster: Cluster, tmp_path: Path) -> None:
    csr = csr_for("pi")
    invitation = cluster.invited("pi").certificate
    assert "expired" in refused(cluster, invitation, csr, NOW + HOUR_S)
    stranger = Cluster(tmp_path / "other", NOW).invited("pi").certificate
    assert "another cluster" in refused(cluster, stranger, csr)
    assert "role owner" in refused(cluster, cluster.owner.certificate, csr)
    assert "role worker" in refused(cluster, cluster.joined("tv").certificate, csr)
    assert "cannot be used" in refused(cluster, b"nonsense", csr)
    cluster.authority.revoke("pi", NOW)
    assert "was revoked" in refused(cluster, invitation, csr)


def test_an_invitation_nobody_wrote_down_is_not_known(cluster: Cluster) -> None:
    """As after restoring an old backup: signed by us, in date, and yet not in the list."""
    before = (cluster.authority.folder / "members.json").read_bytes()
    invitation = cluster.invited("pi").certificate
    (cluster.authority.folder / "members.json").write_bytes(before)
    assert "not known here" in refused(cluster, invitation, csr_for("pi"))


def bad_requests() -> Iterator[bytes]:
    good = csr_for("pi")
    lines = good.splitlines(keepends=True)
    yield b""
    yield b"x" * 1000
    yield b"".join(lines[:2] + lines[3:])
    foreign = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    yield foreign.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(Encoding.PEM)
    der = bytearray(x509.load_pem_x509_csr(good).public_bytes(Encoding.DER))
    der[-1] ^= 1  # the signature, by which a device proves that the key is its own
    yield x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM)


def test_a_bad_request_is_refused_and_does_not_use_the_invitation_up(cluster: Cluster) -> None:
    invitation = cluster.invited("pi").certificate
    for csr in bad_requests():
        assert "request" in refused(cluster, invitation, csr)
    assert cluster.authority.enroll(invitation, csr_for("pi"), NOW)


def test_the_name_is_the_invitations_whatever_the_request_says(cluster: Cluster) -> None:
    invitation = cluster.invited("pi").certificate
    pem = cluster.authority.enroll(invitation, csr_for("desk"), NOW)
    holder = certificates.holder(certificates.from_pem(pem))
    assert (holder.name, holder.role) == ("pi", "worker")


def test_the_owner_is_neither_invited_nor_revoked(cluster: Cluster) -> None:
    for act in (lambda: cluster.authority.revoke("desk", NOW), lambda: cluster.authority.invite("desk", HOUR_S, NOW)):
        with pytest.raises(TrustError, match="desk is this machine"):
            act()


def test_an_unknown_name_is_answered_with_the_known_ones(cluster: Cluster) -> None:
    with pytest.raises(TrustError, match="its devices are: none yet"):
        cluster.authority.revoke("tv", NOW)
    cluster.invited("pi")
    with pytest.raises(TrustError, match="this cluster has no device 'tv'; its devices are: pi"):
        cluster.authority.revoke("tv", NOW)


@pytest.mark.parametrize("name", ["", "-x", ".", "a b", "a/b", "x" * 57, "naïve", "a\n", "٣"])
def test_bad_names(cluster: Cluster, name: str) -> None:
    with pytest.raises(TrustError, match="name"):
        cluster.authority.invite(name, HOUR_S, NOW)
    assert names.is_name(names.name_from(name))


@pytest.mark.parametrize("name", ["a", "Pi-4_b.local", "0", "x" * 56])
def test_good_names(name: str) -> None:
    assert names.check_name(name) == names.name_from(name) == name


def test_lists_of_revoked_are_numbered(cluster: Cluster) -> None:
    def number() -> int:
        return certificates.read_crl(cluster.authority.crl(), cluster.authority.certificate)[0]

    first = number()
    cluster.joined("pi")
    assert number() == first
    cluster.authority.revoke("pi", NOW)
    assert number() == first + 1


def test_open_mends_a_lost_membership(cluster: Cluster) -> None:
    """As after a crash between the list of members and the owner's own files, or an accident with rm."""
    (cluster.at("desk") / "device.pem").unlink()
    reopened(cluster)
    owner = membership_in(cluster.at("desk"))
    assert owner.holder.role == "owner"
    assert owner.holder.serial != cluster.owner.holder.serial
    assert cluster.owner.holder.serial in owner.revoked


def test_open_mends_an_older_list_of_revoked(cluster: Cluster) -> None:
    before = (cluster.at("desk") / "revoked.pem").read_bytes()
    pi = cluster.joined("pi")
    cluster.authority.revoke("pi", NOW)
    (cluster.at("desk") / "revoked.pem").write_bytes(before)
    reopened(cluster)
    assert pi.holder.serial in membership_in(cluster.at("desk")).revoked


def test_a_restored_backup_lets_nobody_back_in(cluster: Cluster) -> None:
    pi = cluster.joined("pi")
    before = (cluster.authority.folder / "members.json").read_bytes()
    cluster.authority.revoke("pi", NOW)
    number = membership_in(cluster.at("desk")).crl_number
    (cluster.authority.folder / "members.json").write_bytes(before)
    cluster.authority = reopened(cluster)
    assert states(cluster) == {"desk": "joined", "pi": "revoked"}
    assert pi.holder.serial in revoked(cluster)
    assert membership_in(cluster.at("desk")).crl_number > number


def test_the_list_is_signed_only_when_it_changes(cluster: Cluster) -> None:
    cluster.joined("pi")
    before = cluster.authority.crl()
    assert reopened(cluster, NOW + 5).crl() == before
    cluster.authority.revoke("pi", NOW)
    assert cluster.authority.crl() != before


def test_a_members_newer_list_is_learned(cluster: Cluster) -> None:
    """Both of the owner's folders are out of a backup, and since then it went on with other revocations."""
    pi, attic, tv = cluster.joined("pi"), cluster.joined("attic"), cluster.joined("tv")
    backup = saved(cluster)
    for name in ("pi", "attic"):
        cluster.authority.revoke(name, NOW)
    newer = cluster.authority.crl()
    for more in ([], ["tv"], ["tv", "pi"], ["tv", "pi", "attic"]):  # its number is lower, equal and higher
        restore(cluster, backup)
        cluster.authority = reopened(cluster)
        for name in more:
            cluster.authority.revoke(name, NOW)
        number = max(membership_in(cluster.at("desk")).crl_number, 3)
        gone = {pi.holder.serial, attic.holder.serial} | ({tv.holder.serial} if more else set())
        assert cluster.authority.learn(newer, NOW + 9) >= gone
        assert revoked(cluster) == membership_in(cluster.at("desk")).revoked >= gone
        assert (membership_in(cluster.at("desk")).crl_number > number) is (len(more) < 3)
        state = {"desk": "joined", "pi": "revoked", "attic": "revoked", "tv": "revoked" if more else "joined"}
        assert states(cluster) == state
        before = cluster.authority.crl()
        cluster.authority.learn(newer, NOW + 9)  # there is no more to learn
        cluster.authority.learn(before, NOW + 9)
        assert cluster.authority.crl() == before


def test_an_invitation_that_a_backup_took_for_good_is_revoked_with_what_came_of_it(cluster: Cluster) -> None:
    invitation = cluster.invited("pi").certificate
    backup = saved(cluster)
    cluster.authority.revoke("pi", NOW)
    newer = cluster.authority.crl()
    restore(cluster, backup)
    certificate = certificates.from_pem(reopened(cluster).enroll(invitation, csr_for("pi"), NOW))
    assert certificate.serial_number in cluster.authority.learn(newer, NOW)
    assert states(cluster)["pi"] == "revoked"


def test_only_what_this_cluster_signed_is_learned(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.authority.crl()
    for crl in (Cluster(tmp_path / "other", NOW).authority.crl(), b"", b"nonsense"):
        with pytest.raises(TrustError, match="list of revoked"):
            cluster.authority.learn(crl, NOW)
    assert cluster.authority.crl() == before


def test_the_owners_certificate_is_renewed(cluster: Cluster) -> None:
    reopened(cluster, NOW + 11 * YEAR_S)
    assert membership_in(cluster.at("desk")).holder.expires > NOW + 20 * YEAR_S


def test_an_owners_certificate_of_a_clock_far_ahead_is_renewed(cluster: Cluster) -> None:
    ahead = NOW + 11 * YEAR_S
    reopened(cluster, ahead)
    early = membership_in(cluster.at("desk")).holder
    assert early.begins > NOW
    reopened(cluster)
    renewed = membership_in(cluster.at("desk")).holder
    assert renewed.begins <= NOW < renewed.expires
    assert early.serial in revoked(cluster)
    reopened(cluster)
    assert membership_in(cluster.at("desk")).holder == renewed  # once


def test_a_cluster_that_was_made_while_the_clock_was_far_ahead_is_valid_once_it_is_right(tmp_path: Path) -> None:
    """Its own certificate cannot be renewed: all its members hold it."""
    cluster = Cluster(tmp_path, NOW + YEAR_S)
    reopened(cluster, NOW)
    for pem in (cluster.authority.pem, membership_in(cluster.at("desk")).certificate):
        assert certificates.from_pem(pem).not_valid_before_utc.timestamp() <= NOW


def test_credentials_of_another_cluster_are_not_replaced(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(tmp_path / "other", NOW)
    with pytest.raises(TrustError, match="not of this cluster's owner"):
        Authority.open(cluster.authority.folder, other.at("desk"), NOW)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 2}', "null", "\x00", "[" * 100_000])
def test_a_damaged_list_of_members_is_an_error(cluster: Cluster, content: str) -> None:
    (cluster.authority.folder / "members.json").write_text(content)
    with pytest.raises(TrustError, match=r"members\.json is damaged"):
        reopened(cluster)


@pytest.mark.parametrize("change", [("state", "king"), ("serial", 3), ("name", "a b"), ("since", None), ("new", 1)])
def test_a_damaged_entry_is_an_error(cluster: Cluster, change: tuple[str, object]) -> None:
    path = cluster.authority.folder / "members.json"
    content = json.loads(path.read_text())
    content["members"][0].update([change])
    path.write_text(json.dumps(content))
    with pytest.raises(TrustError, match="damaged"):
        cluster.authority.members(NOW)


def test_a_foreign_key_is_an_error(cluster: Cluster) -> None:
    (cluster.authority.folder / "ca.key").write_bytes(certificates.key_to_pem(certificates.new_key()))
    with pytest.raises(TrustError, match=re.escape("ca.key does not belong to ca.pem")):
        reopened(cluster)


def test_paths_follow_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, function, usual in (
        ("XDG_CONFIG_HOME", paths.config_folder, ".config"),
        ("XDG_CACHE_HOME", paths.cache_folder, ".cache"),
        ("XDG_STATE_HOME", paths.state_folder, ".local/state"),
    ):
        monkeypatch.delenv(variable, raising=False)
        assert function() == tmp_path / usual / "edge"
        monkeypatch.setenv(variable, "relative")
        assert function() == tmp_path / usual / "edge"
        monkeypatch.setenv(variable, "/elsewhere")
        assert function() == Path("/elsewhere/edge")
    assert list(tmp_path.iterdir()) == []
