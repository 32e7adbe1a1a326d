"""Models in a user's folder. Parts, projectors and damaged files are distinguished from models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge.models.file_kinds import is_gguf, kind_of_file, models_among, parts, use_of
from quant.errors import ModelFileError

_MOST_WARNINGS = 10  # limit of warnings about one folder; further ones are counted


def models_in(folder: Path, warn: Callable[[str], None]) -> list[Path]:
    """Return the models in a folder. A split model is named by its first part.

    Hidden files and files in subfolders do not count.

    warn: called with a line for each file that looks like a model and is not usable as one

    Raises OSError if the folder cannot be read, and ModelFileError, with the files found, if no model is among them.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if is_gguf(path.name) and path.name[0] != "."}
    others = [name for name, path in files.items() if path.is_dir() or not models_among([name])]
    complaints: list[str] = []
    models: list[Path] = []
    for name in models_among(files.keys() - set(others)):
        try:
            missing = [part for part in parts(name) if part not in files or not files[part].exists()]
            if missing:
                complaints.append(f"{folder / name} is left out: {missing[0]} is missing or a broken link")
            elif kind := kind_of_file(files[name]):
                others.append(name)
                complaints.append(f"{folder}: {use_of(kind, name)}")
            else:
                models.append(files[name])
        except (ModelFileError, OSError) as error:
            complaints.append(f"{folder / name} is left out: {error}")
    for line in complaints[:_MOST_WARNINGS]:
        warn(line)
    if len(complaints) > _MOST_WARNINGS:
        warn(f"{folder}: {len(complaints) - _MOST_WARNINGS} more files are left out")
    if not models:
        raise ModelFileError(f"{folder} has no .gguf files of models; {_instead(folder, others)}")
    return models


def _instead(folder: Path, others: list[str]) -> str:
    inside = sorted({path.parent for path in folder.glob("*/*") if is_gguf(path.name)})
    if inside:
        return f"its folder {inside[0].name} has some: name that, {inside[0]}"
    return "name a folder that has some, or a file" + (f" (it has {', '.join(sorted(others)[:3])})" if others else "")
