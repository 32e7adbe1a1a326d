"""Prompts with pictures and sounds on one device: as libmtmd itself computes them, and never computed twice."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edge.llama.multimodal import NativeProjector
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.requests import Request
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from tests.support import projectors
from tests.support.multimodal import BATCH, CONTEXT, encoded, open_projector, own_run, prompt_around

OPTIONS = EngineOptions(context=CONTEXT, batch=BATCH, threads=1)


class Kind:
    """A text model, its projector and an engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.text, self.projector = projectors.write(name, folder)
        self.native, self._model = open_projector(self.text, self.projector)
        self.engine = Engine(self.text, OPTIONS)

    def prompt(self, seed: int = 1) -> tuple[list[int], list]:
        tokens, media = encoded(self.name, self.native, seed)
        return prompt_around(self.engine.model, tokens), media

    def close(self) -> None:
        self.engine.close()
        self.native.close()
        self._model.close()


@pytest.fixture(scope="module", params=projectors.KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    with closing(Kind(request.param, tmp_path_factory.mktemp(request.param))) as kind:
        yield kind


def test_logits_are_those_of_libmtmd_itself(kind: Kind) -> None:
    prompt, media = kind.prompt()
    expected = own_run(kind.name, kind.text, kind.native)
    kind.engine.kv_clear()
    logits = Slot(kind.engine).prefill(prompt)
    assert media and np.array_equal(logits, expected)


def test_another_picture_gives_other_logits(kind: Kind) -> None:
    slot = Slot(kind.engine)
    kind.engine.kv_clear()
    (first, held), (second, also_held) = kind.prompt(1), kind.prompt(2)
    one = slot.prefill(first).copy()
    two = slot.prefill(second).copy()
    assert held and also_held and not np.array_equal(one, two)
    assert np.array_equal(slot.prefill(first), one)
