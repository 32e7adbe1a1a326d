"""Paths of this user's files, by the XDG rules. Nothing is created here."""

from __future__ import annotations

import os
from pathlib import Path


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
    """Return the folder that only the owner's machine has: the cluster's own key, and its list of members."""
    return config_folder() / "authority"


def credentials_folder() -> Path:
    """Return the folder that every member has: its own key and certificate."""
    return config_folder() / "credentials"


def _folder(variable: str, usual: str) -> Path:
    named = os.environ.get(variable, "")
    # The XDG rules say to ignore a relative path: what it means would change with the working folder.
    return (Path(named) if os.path.isabs(named) else Path.home() / usual) / "edge"
