"""Settings of pip that say where packages come from: environment variables first, then its configuration files."""

from __future__ import annotations

import configparser
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_PYPI = "https://pypi.org/simple"


@dataclass(frozen=True)
class PipSettings:
    """Places of packages, and the certificates to trust them by."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]  # folders, and pages of links
    certificates: str | None  # file of authorities; None: those of the system

    @classmethod
    def read(cls) -> PipSettings:
        """Read the settings as pip does. A file that is no configuration is skipped; pip itself reports what is wrong
        with it."""
        config = configparser.RawConfigParser(strict=False)
        for path in _files():
            try:
                config.read(path, encoding="utf-8")
            except (configparser.Error, UnicodeDecodeError):
                continue

        def value(name: str) -> str:
            values = [config.get(section, name, fallback="") for section in ("global", "download")]
            return os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "") or values[1] or values[0]

        indexes = (value("index-url") or _PYPI, *value("extra-index-url").split())
        no_index = value("no-index").lower() in ("1", "true", "yes", "on")
        return cls(() if no_index else indexes, tuple(value("find-links").split()), value("cert") or None)


def _files() -> list[Path]:
    """Configuration files in pip's order: a later one overrides an earlier one."""
    if (named := os.environ.get("PIP_CONFIG_FILE")) == os.devnull:
        return []
    home = Path.home()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    apple = home / "Library" / "Application Support" / "pip"
    user = apple if sys.platform == "darwin" and apple.is_dir() else config_home / "pip"
    paths = [Path("/etc/xdg/pip"), Path("/etc"), home / ".pip", user, Path(sys.prefix)]
    return [*(path / "pip.conf" for path in paths), *([Path(named)] if named else [])]
