"""Paths of this user's files, by the XDG rules. Nothing is created here."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

_NOWHERE = Path("/nonexistent")  # Debian's home for users without one


def config_folder() -> Path:
    """Return the folder of files that must not be lost: keys and certificates."""
    return _folder("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path:
    """Return the folder of files that can be fetched or computed again."""
    return _folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """Return the folder of histories and logs."""
    return _folder("XDG_STATE_HOME", ".local/state")


def authority_folder() -> Path:
    """Return the folder of the cluster's own key and its list of members. Only the owner's machine has it."""
    return config_folder() / "authority"


def credentials_folder() -> Path:
    """Return the folder of this device's own key and certificate. Every member has it."""
    return config_folder() / "credentials"


def home_folder() -> Path:
    """Return this user's home, or a folder that does not exist if the user has none, as in some containers."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    return Path(home) if os.path.isabs(home) else _NOWHERE


def expanded(path: str) -> Path:
    """Return a path that a user typed, with ~ replaced by their home."""
    return home_folder() / path[2:] if path[:2] == "~/" else Path(os.path.expanduser(path))


def _folder(variable: str, usual: str) -> Path:
    named = os.environ.get(variable, "")
    # The XDG rules say to ignore a relative path, because its meaning would change with the working folder.
    return (Path(named) if os.path.isabs(named) else home_folder() / usual) / "edge"
