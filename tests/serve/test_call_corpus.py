"""Test tool calls in the formats of several models: each answer is parsed correctly, however it is split."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.text.templates.formats import FORMATS, CallFormat
from edge.text.thinking_format import ThinkingFormat
from edge.text.thinking_splitter import ThoughtSplitter
from tests.serve.calls import Parsed, parsed, splits
from tests.support.thorough import THOROUGH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "calls").glob("*.toml"))
BY_NAME = {form.name: form for form in FORMATS}
THINKING = ThinkingFormat("<think>", "</think>")
ANSWERS = [
    pytest.param(BY_NAME[path.stem], answer, id=f"{path.stem}: {answer['is']}")
    for path in CORPUS
    for answer in tomllib.loads(path.read_text(encoding="utf-8"))["answer"]
]


def expected(parts: list[Any]) -> Parsed:
    return [
        {"name": part["name"], "arguments": json.loads(part["arguments"])}
        if isinstance(part, dict) and "arguments" in part
        else part
        for part in parts
    ]


def test_each_format_has_twenty_answers_or_more() -> None:
    assert len(CORPUS) >= 14
    for path in CORPUS:
        assert len(tomllib.loads(path.read_text(encoding="utf-8"))["answer"]) >= 20, path


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_an_answer_means_the_same_however_it_is_split(form: CallFormat, answer: dict[str, Any]) -> None:
    whole, streamed = (expected(answer.get(key, answer["parts"])) for key in ("parts", "streamed"))
    thinking = replace(THINKING, calls=form.opens if form.ends_thought else ())
    for number, pieces in enumerate(splits(answer["text"])):
        if not THOROUGH and number > 1 and (number + len(answer["text"])) % 2:
            continue  # another answer of this format is split there
        if "thought" in answer:
            splitter = ThoughtSplitter(thinking, "thought")
            each = [*(splitter.add(piece) for piece in pieces), splitter.end()]
            assert "".join(split.thought for split in each) == answer["thought"], pieces
            pieces = [split.text for split in each]
        assert parsed(form, pieces, streams=True) == streamed, pieces
        if THOROUGH or number % 8 < 2:  # what is held back until it is whole is the same by then
            assert parsed(form, pieces) == whole, pieces
