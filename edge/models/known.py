"""Models that have a name: where each is fetched from, its size and its licence. known.toml lists them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from devices.toml_tables import read_toml
from edge.errors import HubError
from edge.models.wheels import Wheel

_LIST = Path(__file__).with_name("known.toml")


@dataclass(frozen=True)
class KnownModel:
    """Entry of the list: a file in a repository of the hub, or in a wheel."""

    name: str
    about_bytes: int  # size of the file when it was published
    licence: str
    repo: str = ""  # OWNER/NAME on the hub; empty where it comes from a wheel
    file: str = ""
    wheel: Wheel | None = None

    @property
    def source(self) -> str:
        """Source: OWNER/NAME:FILE, as commands take it, or the file name of a wheel."""
        return self.wheel.filename if self.wheel else f"{self.repo}:{self.file}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli/model.md says."""
        return {
            "name": self.name,
            "about_size_bytes": self.about_bytes,
            "licence": self.licence,
            "source": self.source,
        }


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all known models, the smallest first."""
    return tuple(_from_table(table) for table in read_toml(_LIST, HubError)["model"])


def known_model(name: str) -> KnownModel | None:
    """The model of this name, in letters of any case; None if no model is called so."""
    return next((model for model in known_models() if model.name == name.lower()), None)


def nearest_name(name: str) -> str | None:
    """The known name that somebody who typed this probably meant, if there is one."""
    near = get_close_matches(name.lower(), [model.name for model in known_models()], n=1)
    return near[0] if near else None


def _from_table(table: dict[str, Any]) -> KnownModel:
    common = {key: table[key] for key in ("name", "about_bytes", "licence")}
    if "wheel" in table:
        wheel = Wheel(table["wheel"], table["wheel_bytes"], table["sha256"], table["member"], table["about_bytes"])
        return KnownModel(**common, wheel=wheel)
    return KnownModel(**common, repo=table["repo"], file=table["file"])
