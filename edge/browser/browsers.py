"""Browsers that this machine's bridge knows: invited ones and joined ones, each in a folder of its own.

A link has a token that works once. With the token a page gets a key, which its browser keeps. Only digests of tokens
and keys are stored. `credentials` in the same folder is the browser's membership in the cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from devices.files import locked, make_private, try_lock, write_private
from devices.names import check_name
from devices.trust import credentials
from transport.errors import Refused

_FILE = "browser.json"
_TOKEN_BYTES = 16  # 128 random bits


@dataclass(frozen=True)
class Browser:
    """A browser's record."""

    name: str
    token: str | None = None  # digest of the unused token; None: it was used
    expires: float = 0.0  # Unix seconds until which the token works
    key: str | None = None  # digest of the browser's key; None: it has not joined
    port: int = 0  # port of its worker; 0: not chosen yet
    checked: str = ""  # browser whose numbers were right


class BridgeLock:
    """Lock of a folder that its one bridge holds, with the address of its page."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, if no other process has it."""
        make_private(folder)
        self._handle = os.open(folder / ".bridge", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_held = try_lock(self._handle)  # by this process

    @property
    def address(self) -> str:
        """Address of the bridge that holds the lock; "" if it does not serve yet."""
        return os.pread(self._handle, 200, 0).decode("ascii", "replace")

    def publish(self, address: str) -> None:
        """Store the address of this process's page."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, address.encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        if self.is_held:
            os.ftruncate(self._handle, 0)
        os.close(self._handle)


class Browsers:
    """Records in a folder. Commands that run at the same time lose nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def invite(self, name: str, lifetime_s: float, cluster_token: str | None = None, now: float | None = None) -> str:
        """Return the token of a link with which one browser can join as `name` within `lifetime_s` seconds.

        An earlier link for this name, and the key of a browser that had this name, become invalid.
        cluster_token: token of the cluster for the same name; None: there is no cluster.
        """
        check_name(name)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        with locked(self._folder):
            expires = (time.time() if now is None else now) + lifetime_s
            self._save(Browser(name, _digest(token), expires, port=self._load(name).port))
            folder = self.credentials(name)
            for file in (credentials.DEVICE_FILE, credentials.CRL_FILE, credentials.PENDING_FILE):
                (folder / file).unlink(missing_ok=True)
            if cluster_token is not None:
                credentials.store_token(folder, cluster_token)
        return token

    def join(self, token: str, now: float | None = None) -> tuple[str, str]:
        """Return the name and the key of the browser that a link's token is for. The token works no more.

        Raises Refused if the token is unknown, was used or has expired.
        """
        with locked(self._folder):
            digest = _digest(token)
            browser = next((browser for browser in self.all() if browser.token == digest), None)
            if browser is None:
                raise Refused("This link was used already, or is not valid. Ask for a new one.")
            if (time.time() if now is None else now) >= browser.expires:
                raise Refused("This link has expired. Ask for a new one.")
            key = secrets.token_urlsafe(_TOKEN_BYTES)
            self._save(replace(browser, token=None, key=_digest(key)))
        return browser.name, key

    def name_of(self, key: str) -> str | None:
        """Return the name of the browser with this key, or None if there is none."""
        digest = _digest(key)
        return next((browser.name for browser in self.all() if browser.key == digest), None)

    def port(self, name: str) -> int:
        """Return the port of a browser's worker; 0 if none was chosen yet."""
        return self._load(name).port

    def remember_port(self, name: str, port: int) -> None:
        """Use this port for the browser's worker from now on, so that its address stays the same."""
        with locked(self._folder):
            self._save(replace(self._load(name), port=port))

    def checked(self, name: str) -> str:
        """Return the version of the browser whose numbers were right; "" if none was checked."""
        return self._load(name).checked

    def remember_check(self, name: str, browser: str) -> None:
        """Remember that the numbers of this version of the browser are right."""
        with locked(self._folder):
            self._save(replace(self._load(name), checked=browser))

    def forget(self, name: str) -> bool:
        """Refuse a browser and its link from now on. Return False if there is no such browser."""
        with locked(self._folder):
            record = self._folder / name / _FILE
            known = record.exists()
            record.unlink(missing_ok=True)
        return known

    def credentials(self, name: str) -> Path:
        """Return the folder of a browser's membership in the cluster."""
        return self._folder / name / "credentials"

    def names(self) -> list[str]:
        """Return the names of all browsers."""
        return [browser.name for browser in self.all()]

    def changes(self) -> dict[str, float]:
        """Return when the record of each browser changed last, in Unix seconds."""
        times = {}
        for path in self._folder.glob(f"*/{_FILE}"):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                times[path.parent.name] = path.stat().st_mtime
        return times

    def all(self) -> list[Browser]:
        """Return the records of all browsers."""
        return [self._load(path.parent.name) for path in sorted(self._folder.glob(f"*/{_FILE}"))]

    def _load(self, name: str) -> Browser:
        """Return a browser's record. A missing or damaged one is as good as new, because a new link replaces it."""
        try:
            return Browser(**json.loads((self._folder / name / _FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return Browser(name)

    def _save(self, browser: Browser) -> None:
        write_private(self._folder / browser.name / _FILE, json.dumps(asdict(browser)).encode())


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "replace")).hexdigest()
