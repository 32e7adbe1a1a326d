"""Test that the answers of an engine with stages form groups of equal size, whenever they begin."""

from collections.abc import Sequence

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH


@pytest.mark.parametrize(
    ("microbatches", "n_answers", "groups"), [(3, 4, [2, 2]), (4, 6, [2, 2, 2]), (3, 5, [1, 2, 2]), (3, 3, [1, 1, 1])]
)
def test_answers_that_begin_one_by_one_form_equal_groups(
    microbatches: int, n_answers: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    with Engine(MODEL_PATH, EngineOptions(context=512, sequences=n_answers, threads=1)) as engine:
        submit = engine.submit

        def counted(tokens: Sequence[int], *how: object, **more: object) -> None:
            sizes.append(len(tokens))
            submit(tokens, *how, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "submit", counted)
        monkeypatch.setattr(engine, "stages", microbatches)
        monkeypatch.setattr(engine, "microbatches", microbatches)
        with Scheduler(engine) as scheduler:
            for i in range(n_answers):
                scheduler.add(Request([3 + i], 40, SamplingParams(temperature=0), ends=False))
                scheduler.step()
            for _ in range(60):
                scheduler.step()
            assert sorted(sizes[-len(groups) :]) == groups
            assert sorted(sizes[-2 * len(groups) : -len(groups)]) == groups
