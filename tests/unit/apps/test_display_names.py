"""A model has the name that the user typed in the output of every command."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps import planning
from apps.commands import bench, serve
from edge.models.demo import MODEL_PATH


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("owner/repo:file-q4_0.gguf", "owner/repo:file-q4_0.gguf"),
        ("owner/repo:q4_0", "owner/repo:q4_0"),
        ("https://huggingface.co/owner/repo/blob/main/file.gguf", MODEL_PATH.stem),
        (str(MODEL_PATH), MODEL_PATH.stem),
    ],
)
def test_a_served_model_has_the_typed_name(monkeypatch: pytest.MonkeyPatch, typed: str, name: str) -> None:
    monkeypatch.setattr(serve, "model_path", lambda spec: MODEL_PATH)
    assert serve._models([typed], several=False) == {name: MODEL_PATH}


@pytest.mark.parametrize("typed", ["smollm2-135m", None])
def test_a_measured_model_has_the_typed_name(capsys: pytest.CaptureFixture[str], typed: str | None) -> None:
    rate = SimpleNamespace(mean=1.0, deviation=0.0, median=1.0)
    result: Any = SimpleNamespace(threads=1, prompt_tokens=1, gen_tokens=1, prefill=rate, decode=rate, throughput=None)
    engine: Any = SimpleNamespace(path=MODEL_PATH, shape=SimpleNamespace(weight_bytes=1))
    bench._print_speeds(argparse.Namespace(model=typed, requests=1), engine, result)
    rows = capsys.readouterr().out.splitlines()[2:4]
    assert all(row.startswith(f"| {typed or MODEL_PATH.name} |") for row in rows)


def test_the_next_command_names_the_typed_model_or_the_file_of_a_type() -> None:
    def words(model: str | None, *types: str) -> list[str]:
        return planning.typed_model(argparse.Namespace(model=model, types=types), Path("cache/m-q8_0.gguf"))

    assert words("smollm2-135m") == ["smollm2-135m"]
    assert words(None) == []
    assert words("smollm2-135m", "q8_0") == words(None, "q8_0") == ["cache/m-q8_0.gguf"]
