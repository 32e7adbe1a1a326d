"""Checks of this device's identity: its credentials, their file permissions, and the clock for their validity."""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass

from devices.errors import TrustError
from devices.paths import authority_folder, credentials_folder
from devices.trust import credentials
from devices.trust.authority import KEY_FILE, is_owned, read_keys
from devices.trust.certificates import CLOCK_SKEW_S, DAY_S, INVITED, Holder
from devices.trust.credentials import DEVICE_FILE
from edge.profiling.doctor.findings import NOTE, OK, PROBLEM, Verdict

SOON_S = 30 * DAY_S  # a certificate that expires within this time is reported
FAR_S = 60.0  # largest unreported difference between two clocks; invitations are valid for an hour


@dataclass(frozen=True)
class Trust:
    """Credentials of this device. Times are Unix seconds."""

    now: float
    holder: Holder  # holder of the device's certificate
    readable: tuple[str, ...] = ()  # key files that other users may read


def read_trust(now: float | None = None) -> Trust | None:
    """Read this device's credentials, or return None if it is in no cluster.

    Nothing is repaired, because a repair with a wrong clock would revoke valid certificates.
    Raises TrustError if the files of this device or of the owner are damaged.
    """
    owned = is_owned(authority_folder())
    if owned:
        read_keys(authority_folder())
    membership = credentials.load(credentials_folder())
    if membership is None:
        if owned:
            raise TrustError(f"the owner's credentials in {credentials_folder()} are gone; edge devices makes new ones")
        return None
    keys = [path for path in (credentials_folder() / DEVICE_FILE, authority_folder() / KEY_FILE) if path.exists()]
    readable = tuple(str(path) for path in keys if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    return Trust(time.time() if now is None else now, membership.holder, readable)


def trust(trust: Trust | None) -> Verdict:
    """Check that this device can prove its identity, and that no other user can read its keys."""
    if trust is None:
        return Verdict(OK, "in no cluster; edge cluster init makes one, edge worker --join joins one")
    seen = f"{trust.holder.name}, {trust.holder.role}"
    if trust.readable:
        files = " ".join(trust.readable)
        return Verdict(PROBLEM, f"others may read the keys of {seen}: {files}", f"chmod 600 {files}")
    if trust.holder.role == INVITED:
        seen += ", not yet a member"
        return Verdict(NOTE, seen, "let edge worker run here, and run edge devices on the owner's machine")
    return Verdict(OK, f"{seen}; its keys are this user's alone")


def clock(trust: Trust | None) -> Verdict:
    """Check that this device's clock is within the validity of its certificate."""
    if trust is None:
        return Verdict(OK, "no certificate to compare it with")
    set_it = "set the clock (timedatectl set-ntp true)"
    if trust.now < trust.holder.begins:
        seen = f"the clock is {_days(trust.holder.begins - trust.now)} before this device's certificate begins"
        return Verdict(PROBLEM, seen, set_it)
    left_s = trust.holder.expires - trust.now
    invite = f"edge cluster invite {trust.holder.name} on the owner's machine, then edge worker --join here"
    if left_s <= 0:
        seen = f"this device's certificate ended {_days(-left_s)} ago, by its clock"
        return Verdict(PROBLEM, seen, f"{set_it}; if it is right: {invite}")
    if left_s < SOON_S and trust.holder.role != INVITED:
        return Verdict(NOTE, f"this device's certificate ends in {_days(left_s)}", invite)
    return Verdict(OK, "within the time of this device's certificate")


def clocks_apart(ahead_s: float) -> Verdict:
    """Check that two devices agree on the time. ahead_s: worker's clock minus this device's clock."""
    seen = f"{abs(ahead_s):,.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this device's clock"
    set_both = "set both clocks by a time server (timedatectl set-ntp true)"
    if abs(ahead_s) > CLOCK_SKEW_S:
        return Verdict(PROBLEM, f"{seen}: new certificates are not yet valid there, or have expired", set_both)
    return Verdict(NOTE, seen, set_both) if abs(ahead_s) > FAR_S else Verdict(OK, seen)


def _days(seconds: float) -> str:
    return f"{seconds / DAY_S:.1f} days" if seconds >= DAY_S else f"{seconds / 3600:.1f} hours"
