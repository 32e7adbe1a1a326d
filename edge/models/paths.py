"""Where a model is, as a program names it."""

from __future__ import annotations

import os
from pathlib import Path

from edge.demo import MODEL_PATH
from edge.models import hub

PathLike = str | os.PathLike[str]


def model_path(model: PathLike | None) -> Path:
    """The bundled model for None, a local file, or REPO:FILE from the hub, fetched where it is not cached.

    ModelFileError where there is no such file; HubError where it cannot be fetched.
    """
    return MODEL_PATH if model is None else hub.resolve(os.fspath(model))
