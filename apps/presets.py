"""Presets of `edge serve --config`: models in a TOML file, each with a name, options and a system prompt."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from apps.errors import UsageError
from apps.options import Parser, model_path
from devices.toml_tables import Table, check_keys, reading_toml, tables
from edge.errors import EdgeError

# Options of the command that a preset may set for its model.
OPTIONS = (
    "attention-window", "batch", "context", "draft", "encoder", "flash-attention", "gpu-layers", "gpu-memory",
    "io-chunk", "io-threads", "kv-type", "lora", "memory", "mmproj", "prefer", "prefix-cache", "repack", "spm-infill",
    "think", "threads", "verify", "window",
)  # fmt: skip
FILES = ("draft", "lora", "mmproj")  # options whose value may be a path relative to the file of presets
KEYS = ("name", "model", "system", "pinned", *OPTIONS)


@dataclass(frozen=True)
class Preset:
    """A model to serve under a name."""

    path: Path
    args: argparse.Namespace  # options of the command, overridden by those of the preset
    system: str
    pinned: bool


class _OptionParser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def read_presets(
    path: Path, args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> dict[str, Preset]:
    """Return the presets of a file, by name.

    args: options of the command, which presets override.
    add_arguments: function that adds the options of the command to a parser.

    Raises OSError if the file cannot be read, and UsageError with the file, table and key if it is not valid.
    """
    parser = _OptionParser(add_help=False)
    add_arguments(parser)
    presets: dict[str, Preset] = {}
    with reading_toml(path, UsageError) as data:
        check_keys(data, ("model",), "it", UsageError)
        for table in tables(data, "model", UsageError):
            table.check_keys(KEYS)
            name = _text(table, "name")
            if name in presets:
                table.refuse("name", "needs a name that no other model has")
            presets[name] = _preset(table, path.parent, parser, args)
    if not presets:
        raise UsageError(f"{path} has no models; add a table [[model]] with the keys name and model for each")
    return presets


def _preset(table: Table, folder: Path, parser: argparse.ArgumentParser, args: argparse.Namespace) -> Preset:
    own = copy.copy(args)
    for key in OPTIONS:
        words = _words(table, key, folder)
        try:
            parser.parse_args(words, own)
        except UsageError as error:
            raise UsageError(f"{table.where}.{key}: {error}") from None
    spec = _text(table, "model")
    try:
        path = model_path(_relative_to(folder, spec))
    except (EdgeError, OSError) as error:
        raise UsageError(f"{table.where}.model: {error}") from None
    if not path.is_file():
        table.refuse("model", "needs the file of a model, a known name, or REPO:FILE")
    pinned = table.get("pinned") or False
    if not isinstance(pinned, bool):
        table.refuse("pinned", "needs true or false")
    system = _text(table, "system") if "system" in table.values else ""
    return Preset(path, own, system, pinned)


def _words(table: Table, key: str, folder: Path) -> list[str]:
    """Return a key of a preset as words of a command line."""
    value = table.get(key)
    if value is None or value is False:
        return ["--no-repack"] if key == "repack" and value is False else []
    if value is True:
        return [f"--{key}"]
    values = value if isinstance(value, list) and key == "lora" else [value]
    if not all(isinstance(part, str | int | float) for part in values):
        table.refuse(key, "needs a text or a number")
    return [f"--{key}={_relative_to(folder, part) if key in FILES else part}" for part in map(str, values)]


def _relative_to(folder: Path, spec: str) -> str:
    """Return `spec` as a path in `folder` if that file exists, with or without a :SCALE; else return it unchanged."""
    file = folder / spec
    is_there = file.exists() or (folder / spec.rpartition(":")[0]).is_file()
    return str(file) if is_there else spec


def _text(table: Table, key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        table.refuse(key, "needs a text")
    return value
