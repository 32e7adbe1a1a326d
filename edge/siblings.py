"""Imports the packages next to `edge` before a user's modules of the same names can hide them.

`devices`, `partition`, `quant` and `transport` are plain names, and a script's folder is first on `sys.path`. Without
this module, a user's `devices.py` there would be imported instead of ours. docs/architecture.md gives the details.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # folder that holds all packages
NEEDED = ("devices", "partition", "quant", "transport")  # packages that `import edge` uses


def import_siblings(*names: str) -> None:
    """Import these packages from the folder that holds `edge`.

    Raises ImportError if the program has imported its own module under one of the names, because a process can hold
    only one module of a name.
    """
    for name in names:
        if name in sys.modules:
            _check_ours(name, sys.modules[name])
        else:
            _import(name)


def _import(name: str) -> None:
    spec = PathFinder.find_spec(name, [_ROOT])
    if spec is None or spec.loader is None:
        raise ImportError(f"edge is not complete: its package {name!r} is not in {_ROOT}; install it again", name=name)
    package = importlib.util.module_from_spec(spec)
    vars(package)["__getattr__"] = lambda attribute: _missing(name, attribute)
    sys.modules[name] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[name]
        raise


def _check_ours(name: str, module: ModuleType) -> None:
    ours = os.path.realpath(os.path.join(_ROOT, name))
    if ours not in map(os.path.realpath, getattr(module, "__path__", ())):
        raise ImportError(
            f"edge needs its own package {name!r}, but this program has imported {_file(module)} under that name:"
            " rename that file, or use edge in a process of its own",
            name=name,
        )


def _missing(name: str, attribute: str) -> Any:
    """Raise AttributeError. If a user's file has the same name, the message names it, because it was probably meant."""
    message = f"module {name!r} has no attribute {attribute!r}"
    spec = PathFinder.find_spec(name, [folder for folder in sys.path if os.path.realpath(folder) != _ROOT])
    if spec is not None and spec.origin and not attribute.startswith("__"):
        message += f": it is a package of edge, which hides {spec.origin}; rename that file to use both"
    raise AttributeError(message, name=attribute, obj=sys.modules[name])


def _file(module: ModuleType) -> str:
    folders = list(getattr(module, "__path__", ()))
    return str(getattr(module, "__file__", None) or (folders[0] if folders else "another module"))
