"""Catalog of published models, with the source, shape and licence of each.

catalog.toml contains the catalog, and users may add catalogs of their own.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from devices.toml_tables import Table, check_keys, reading_toml, tables
from edge.errors import CatalogError
from edge.models.shapes import Shape, ShapeError, shape
from edge.models.wheels import Wheel
from quant.errors import UnknownTypeError
from quant.mixes import mix_by_name
from quant.text import count_text

_LIST = Path(__file__).with_name("catalog.toml")
_KEYS = ("name", "repo", "file", "about_bytes", "licence", "types", "parameters", "shape", "scores")
_WHEEL_KEYS = ("wheel", "wheel_bytes", "sha256", "member")
_SCORE_KEYS = ("name", "value", "date", "source")
_MOST_OFF = 0.02  # tolerance as a fraction, because published parameter counts are rounded
_MOST = 1e15  # limit of bytes, and of parameters
_SHAPE_KEYS: dict[str, Any] = {field.name: field.type for field in fields(Shape)}
_FIGURES: Mapping[Any, tuple[tuple[type, ...], str]] = {  # types and error text for each type of figure
    int: ((int,), "needs a whole number, without a unit"),
    float: ((int, float), "needs a number, without a unit"),
    bool: ((bool,), "needs true or false"),
    str: ((str,), "needs a text"),
}


@dataclass(frozen=True)
class Score:
    """Result of a benchmark, as the makers of a model published it."""

    name: str
    value: float
    date: str  # date of publication, such as 2024-09-25
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/advise.md."""
        return {"name": self.name, "value": self.value, "date": self.date, "source": self.source}


@dataclass(frozen=True)
class KnownModel:
    """Entry of the catalog: a file in a hub repository or in a wheel, or only a shape."""

    name: str
    about_bytes: int  # size of the file when it was published; 0 for an entry with only a shape
    licence: str
    repo: str = ""  # OWNER/NAME on the hub; empty for a model from a wheel
    file: str = ""
    wheel: Wheel | None = None
    types: tuple[str, ...] = ()  # mixes of the repository's files; the mix of `file` comes first
    parameters: float = 0.0  # published number of parameters; 0 without a shape
    shape: Shape | None = None  # None if certain figures are unknown, so that nothing can be predicted
    scores: tuple[Score, ...] = ()

    @property
    def source(self) -> str:
        """OWNER/NAME:FILE, as in commands, or the file name of a wheel; "" for an entry with only a shape."""
        return self.wheel.filename if self.wheel else f"{self.repo}:{self.file}" if self.repo else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/model.md."""
        return {
            "name": self.name,
            "about_size_bytes": self.about_bytes,
            "licence": self.licence,
            "source": self.source,
        }


@functools.cache
def catalog() -> tuple[KnownModel, ...]:
    """Return the catalog. Files come first, the smallest at the beginning, then entries with only a shape."""
    return read_catalog(_LIST, (*_KEYS, *_WHEEL_KEYS))


def read_catalog(path: Path, keys: Sequence[str] = _KEYS) -> tuple[KnownModel, ...]:
    """Return the models of a catalog file.

    keys: permitted keys of a model

    Raises CatalogError, which names the wrong place, or OSError if the file cannot be read.
    """
    with reading_toml(path, CatalogError) as data:
        check_keys(data, ("model",), "the file", CatalogError)
        models = tuple(_model(table, keys) for table in tables(data, "model", CatalogError))
        names = [model.name for model in models]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise CatalogError(f"model[{i}].name: another model is called {name!r}; use another name")
        return models


def known_models() -> tuple[KnownModel, ...]:
    """Return all models that can be fetched by name, the smallest first."""
    return tuple(model for model in catalog() if model.source)


def known_model(name: str) -> KnownModel | None:
    """Return the model of this name in any letter case; None if there is none."""
    return next((model for model in known_models() if model.name == name.lower()), None)


def nearest_name(name: str) -> str | None:
    """Return the known name that is closest to a mistyped name; None if none is close."""
    near = get_close_matches(name.lower(), [model.name for model in known_models()], n=1)
    return near[0] if near else None


def _model(table: Table, keys: Sequence[str]) -> KnownModel:
    table.check_keys(keys)
    name = _text(table, "name", "a name")
    if name != name.lower() or any(c.isspace() or c in ":/" for c in name):
        table.refuse("name", "needs lower-case letters, digits, '-', '_' or '.'")
    wheel = None
    if table.get("wheel") is not None:
        values = table.values
        wheel = Wheel(values["wheel"], values["wheel_bytes"], values["sha256"], values["member"], values["about_bytes"])
    repo = _text(table, "repo", "OWNER/NAME on the hub", "")
    file = _text(table, "file", "the name of a file in the repository", "")
    if bool(repo) != bool(file) or (repo and repo.count("/") != 1):
        table.refuse("repo", "needs OWNER/NAME on the hub, with file")
    shape = _shape(table)
    return KnownModel(
        name,
        table.whole("about_bytes", 1, int(_MOST)) or 0,
        _text(table, "licence", "a licence", "" if not (repo or wheel) else None),
        repo,
        file,
        wheel,
        _types(table),
        _parameters(table, shape),
        shape,
        tuple(_score(score, f"{table.where}.scores[{i}]") for i, score in enumerate(_list(table, "scores", Mapping))),
    )


def _text(table: Table, key: str, needs: str, default: str | None = None) -> str:
    """Return a short text. If the key is missing, return `default`, or refuse the table if `default` is None."""
    value = table.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not 0 < len(value) <= 300 or not value.isprintable():
        table.refuse(key, f"needs {needs}, in quotes")
    return value


def _list(table: Table, key: str, kind: type) -> list[Any]:
    value = table.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        table.refuse(key, "needs a list")
    return value


def _types(table: Table) -> tuple[str, ...]:
    try:
        return tuple(mix_by_name(name).name for name in _list(table, "types", str))
    except UnknownTypeError as error:
        raise CatalogError(f"{table.where}.types: {error}") from None


def _shape(table: Table) -> Shape | None:
    figures = table.get("shape")
    if figures is None:
        return None
    if not isinstance(figures, Mapping):
        table.refuse("shape", "needs a table: shape = { arch = ..., layers = ..., ... }")
    inner = Table(figures, f"{table.where}.shape", CatalogError)
    inner.check_keys(tuple(_SHAPE_KEYS))
    for key, value in figures.items():
        kinds, needs = _FIGURES[_SHAPE_KEYS[key]]
        if type(value) not in kinds:  # bool is a subclass of int
            inner.refuse(key, needs)
    try:
        return shape(**{"arch": "", **figures})
    except ShapeError as error:
        raise CatalogError(f"{inner.where}: {error}") from None
    except TypeError as error:  # a figure that every shape needs is missing
        raise CatalogError(f"{inner.where}: {str(error).partition('() ')[2]}; give it") from None


def _parameters(table: Table, shape: Shape | None) -> float:
    published = table.number("parameters", 1, _MOST)
    if shape is None:
        return 0.0
    if published is None:
        table.refuse("parameters", "needs the published number of parameters, such as 4.02e9, to check the shape by")
    if abs(shape.parameters / published - 1) > _MOST_OFF:
        counted = count_text(shape.parameters)
        table.refuse("parameters", f"needs what the shape makes, {counted}: one of the two is wrong")
    return published


def _score(values: Mapping[str, Any], where: str) -> Score:
    table = Table(values, where, CatalogError)
    table.check_keys(_SCORE_KEYS)
    value = table.number("value", -1e9, 1e9)
    date = table.get("date")
    if value is None:
        table.refuse("value", "needs a number")
    if not isinstance(date, datetime.date):
        table.refuse("date", "needs a date such as 2024-09-25, without quotes")
    return Score(
        _text(table, "name", "the benchmark"), value, date.isoformat()[:10], _text(table, "source", "an address")
    )
