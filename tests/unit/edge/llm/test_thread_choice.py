"""Choice of the number of threads: by the model, by what others use, and by what answers took. All figures are made
up."""

from pathlib import Path

import pytest

from devices.busy import OthersLoad
from edge.demo import MODEL_PATH
from edge.llama.thread_choice import ThreadChoice, worth_threads
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models import shapes, synth
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from tests.support.drafting import one_slot


def choice(loads: list[float], most: int = 4, cores: int = 4) -> ThreadChoice:
    """A choice on a machine of so many cores, of which others use these, one figure after the other."""
    return ThreadChoice(most, cores=cores, load=lambda: loads.pop(0))


def answer(ms: float) -> list[float]:
    """An answer whose tokens take so long, but for the first, which a burst hit."""
    return [ms / 1e3 * 50, *[ms / 1e3] * 20]


def test_a_tiny_model_wants_one_thread_and_a_large_one_all(tmp_path: Path) -> None:
    demo = GgufFile.open(MODEL_PATH)
    assert worth_threads(demo, ModelShape.from_gguf(demo)) == 1
    path = tmp_path / "wide.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=1, embd=2048, ff=8192, heads=8, kv=8, vocab=512), "q8_0")
    wide = GgufFile.open(path)
    assert worth_threads(wide, ModelShape.from_gguf(wide)) >= 16


@pytest.mark.parametrize(("others", "threads"), [(0.0, 4), (0.4, 4), (0.6, 3), (1.9, 2), (2.6, 1), (4.0, 1), (9.0, 1)])
def test_it_begins_with_what_others_leave_free(others: float, threads: int) -> None:
    assert choice([others]).begin() == threads


def test_hyperthreads_that_others_use_leave_the_physical_cores() -> None:
    assert choice([4.0], most=4, cores=8).begin() == 4
    assert choice([6.0], most=4, cores=8).begin() == 2


def test_fewer_are_tried_where_others_came_and_kept_only_where_clearly_faster() -> None:
    slower = choice([0.0, 2.0, 2.0, 2.0])
    slower.begin()
    assert slower.answered(answer(10)) == 2  # on trial
    assert slower.answered(answer(9)) == 4  # not clearly faster: as before
    faster = choice([0.0, 2.0, 2.0, 2.0])
    faster.begin()
    assert faster.answered(answer(10)) == 2
    assert faster.answered(answer(7)) == 2
    assert faster.answered(answer(7)) == 2


def test_a_trial_that_failed_is_repeated_ever_more_seldom() -> None:
    chosen = choice([0.0] + [2.0] * 12)
    chosen.begin()
    used = [chosen.answered(answer(10)) for _ in range(12)]
    assert used == [2, 4, 4, 2, 4, 4, 4, 2, 4, 4, 4, 4]


def test_when_the_others_have_gone_more_are_tried() -> None:
    chosen = choice([3.0, 0.0, 0.0])
    assert chosen.begin() == 1
    assert chosen.answered(answer(40)) == 4
    assert chosen.answered(answer(12)) == 4


def test_tokens_that_take_far_longer_than_they_did_try_half_though_nobody_is_seen() -> None:
    chosen = choice([0.0] * 4)
    chosen.begin()
    assert chosen.answered(answer(10)) == 4
    assert chosen.answered(answer(19)) == 4
    assert chosen.answered(answer(21)) == 2


def test_an_answer_of_few_tokens_tells_nothing() -> None:
    chosen = choice([0.0, 4.0])
    chosen.begin()
    assert chosen.answered([1.0] * 7) == 4


def test_the_load_of_others_is_all_that_is_used_but_for_this_process() -> None:
    counts = iter([(10.0, 100.0, 5.0), (10.01, 100.02, 5.0), (12.0, 103.5, 6.5), (14.0, 104.5, 8.5)])
    load = OthersLoad(lambda: next(counts))
    assert load.cores() == 0.0  # 10 ms are too few to tell, and count for the next answer
    assert load.cores() == pytest.approx((3.5 - 1.5) / 2)
    assert load.cores() == 0.0  # never below


def generated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that llama.cpp is told while and after an answer of twelve tokens is generated."""
    reported: list[int] = []
    use = engine._context.use_threads

    def noted(threads: int) -> None:
        reported.append(threads)
        use(threads)

    monkeypatch.setattr(engine._context, "use_threads", noted)
    list(generate(one_slot(engine), Request([1, 2, 3], 12, SamplingParams(temperature=0, seed=1))))
    return reported


def test_an_engine_follows_the_load_between_answers_and_obeys_threads_that_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Engine(MODEL_PATH, EngineOptions(context=64, follows_load=True)) as engine:
        engine._choice = choice([2.0], most=4)
        assert generated(engine, monkeypatch) == [engine.threads] == [2]
    for options in (EngineOptions(context=64, threads=2, follows_load=True), EngineOptions(context=64)):
        with Engine(MODEL_PATH, options) as engine:
            assert generated(engine, monkeypatch) == []
            assert engine.threads == (options.threads or 1)
