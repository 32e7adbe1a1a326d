"""Paths of models, from the names that people and programs use."""

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
    """Return the path of a model. Models with a known name and models on the hub are fetched if they are missing.

    model: local file, known name, or REPO:FILE on the hub; None: the bundled model. A local file has precedence over a
        known name.

    Raises ModelFileError, with the nearest known name, if there is no such file. Raises HubError if it cannot be
    fetched.
    """
    return local_path(model) or pull(os.fspath(model or ""), progress)


def local_path(model: PathLike | None) -> Path | None:
    """Return the path of a model as `model_path` does, or None if the model must be fetched first.

    Raises ModelFileError and HubError if no such model can exist.
    """
    if model is None:
        return MODEL_PATH
    path, spec = Path(model), os.fspath(model)
    if path.is_file():  # checked first, because reading the catalog takes longer than loading a small model
        return first_part(path)
    known = known_model(spec)
    if path.exists() and known is None:
        return path
    if known is None and not addresses.is_address(spec):
        raise ModelFileError(f"no such file: {_with_hint(spec)}")
    file = "" if known is not None else addresses.parse(spec).file
    if is_gguf(file) and (kind := kind_by_name(file)):
        raise HubError(f"{spec} is not a model: {use_of(kind, file)}")
    return _here(spec, known)


def pull(spec: str, progress: Progress | None = None) -> Path:
    """Fetch a model by its known name, or the newest version of REPO:FILE. Return its path. Raises HubError on
    failure."""
    known = known_model(spec)
    if known is not None and known.wheel:
        return wheels.fetch(known.wheel, progress)
    if known is None and "/" not in spec:
        raise HubError(f"no such model: {_with_hint(spec)}")
    return hub.pull(addresses.parse(known.source if known else spec), progress=progress)


def first_part(path: Path) -> Path:
    """Return the first part of a split model from the path of any part. Return other paths unchanged.

    Raises ModelFileError if the first part is missing.
    """
    first = path.with_name(parts(path.name)[0])
    if not first.exists():
        raise ModelFileError(
            f"{path}: this is a part of a split model, and {first.name} is missing; put all parts into one folder"
        )
    return first


def is_here(known: KnownModel) -> bool:
    """Return whether a known model has been fetched."""
    return _here(known.source, known) is not None


def fetched_models() -> dict[str, Path]:
    """Return all fetched models. The keys are known names for models from wheels, and "OWNER/NAME:FILE" for others."""
    of_wheels = {known.name: known.wheel.path for known in known_models() if known.wheel and is_here(known)}
    return {**of_wheels, **hub.cached_models()}


def _here(spec: str, known: KnownModel | None) -> Path | None:
    """Return the path of a model that was fetched before; None if it was not."""
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
