"""Answers with drafted tokens are those without: on every engine, by every kind of draft, however wrong these are."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edge.errors import EngineError
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import GreedyDrafter, generate
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import USED_MEANWHILE
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from edge.speculate.choice import MOST_ROWS
from edge.speculate.factory import drafts, speculation, with_room
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.small_model import ModelDrafts
from edge.speculate.speculation import Drafts, Speculation
from partition.model.file import ModelFile
from tests.conftest import OPTIONS, Synthetic
from tests.support.deployments import pipeline, questions, stages, tensor
from tests.support.drafting import (
    GREEDY,
    ROOM,
    Answers,
    Known,
    always,
    ids,
    one_slot,
    plain_answers,
    run,
    same_distribution,
    speculate,
    tokens_of,
)
from tests.support.paging import ALL_FITS, MIB, least, paged, streams
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import Mortal, replaceable
from tests.support.thorough import THOROUGH, some, thorough

PROMPT = [5, 300, 17, 401, 88, 260, 33, 499]
PAGED = replace(ROOM, batch=16, memory=ALL_FITS)
N_QUESTIONS = some(6, 200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of held-out questions."""
    return [list(request.prompt) for request in questions(N_QUESTIONS)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Answers:
    return plain_answers(prompts)


@pytest.fixture(scope="module")
def fewer_bits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    """The bundled model as it drafts for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        model = ModelFile.open(MODEL_PATH)
        result, again = drafts("self", model), drafts("self", model)
        assert isinstance(result, ModelFile)
        assert isinstance(again, ModelFile)
        assert (result.path, result.stamp(result.path)) == (again.path, again.stamp(again.path))  # made once
        yield result


On = Callable[[Path], AbstractContextManager[TextEngine]]
ENGINES: dict[str, On] = {
    "one device": lambda _: Engine(MODEL_PATH, ROOM),
    "paged": lambda _: paged(MODEL_PATH, least(MODEL_PATH, PAGED), PAGED),
    "tensor": lambda folder: ranks_here(MODEL_PATH, tensor(1, 1), ROOM, folder),
    "stages": lambda folder: ranks_here(MODEL_PATH, pipeline(1, 1), ROOM, folder),
    "thin owner": lambda folder: ranks_here(MODEL_PATH, pipeline(0, 1), ROOM, folder),
    "3 ranks": lambda folder: ranks_here(MODEL_PATH, tensor(1, 1, 1), ROOM, folder),
    "3 stages": lambda folder: ranks_here(MODEL_PATH, pipeline(1, 1, 1), ROOM, folder),
    "2 x 2": lambda folder: ranks_here(MODEL_PATH, stages(2, 2), ROOM, folder),
}
FIRST = ("one device", "paged", "tensor", "stages", "thin owner")


@pytest.mark.parametrize("where", [*FIRST, *thorough(*(name for name in ENGINES if name not in FIRST))])
def test_greedy_answers_are_the_same(
    where: str,
    tmp_path: Path,
    prompts: list[list[int]],
    plain: Answers,
    fewer_bits: Path,
) -> None:
    """Answers to held-out questions, with drafts from the text and partly right ones; on one device also with drafts
    from a model, and with ones that are right or never right. EDGE_THOROUGH=1 has all drafts on all engines."""
    with ExitStack() as stack:
        engine = stack.enter_context(ENGINES[where](tmp_path))
        assert where != "paged" or (isinstance(engine, Engine) and streams(engine))
        kinds: dict[str, Drafts] = {"ngram": NgramDrafts(), "wrong 3": Known(plain, 3)}
        if where == "one device" or THOROUGH:
            small = stack.enter_context(Engine(MODEL_PATH, replace(ROOM, context=64, outputs=1)))
            itself = stack.enter_context(Engine(fewer_bits, replace(ROOM, outputs=1)))
            kinds["model"] = ModelDrafts(GreedyDrafter(small))
            kinds["self"] = ModelDrafts(GreedyDrafter(itself))
            kinds |= {f"wrong {wrong}": Known(plain, wrong) for wrong in (0, 1)}
        accepted = {}
        for name, source in kinds.items():
            drafter = speculate(source, choice=always(8 if name == "wrong 3" else MOST_ROWS))
            results = {}
            total: Counter[str] = Counter()
            for prompt in prompts:
                results[tuple(prompt)] = ids(run(engine, prompt, drafter))
                total.update(accepted=drafter.stats.accepted, drafted=drafter.stats.drafted)
            assert results == plain, name
            accepted[name] = total
    assert accepted["ngram"]["accepted"] > 0
    assert 0.3 < accepted["wrong 3"]["accepted"] / accepted["wrong 3"]["drafted"] < 0.7
    if "model" in kinds:
        assert accepted["wrong 0"]["accepted"] == accepted["wrong 0"]["drafted"] > 50
        assert accepted["wrong 1"]["accepted"] == 0 < accepted["wrong 1"]["drafted"]
        assert accepted["model"]["accepted"] > 0.6 * accepted["model"]["drafted"]  # the same model, of less text
        assert accepted["self"]["accepted"] > 0.3 * accepted["self"]["drafted"]


def test_the_cache_holds_what_was_chosen(llama: Engine, synthetic: Synthetic) -> None:
    """Also of drafts that were wrong: the next question continues from there, as without."""
    path = synthetic("llama", "q8_0")
    with Engine(path, replace(OPTIONS, outputs=MOST_ROWS)) as engine:
        answer = ids(run(llama, PROMPT, None))
        session, other = one_slot(engine), one_slot(llama)
        for wrong in (0, 1, 2, 5):
            session.drafts.drafter = speculate(Known({tuple(PROMPT): answer}, wrong))
            list(generate(session, Request(PROMPT, 11, GREEDY)))
            list(generate(other, Request(PROMPT, 11, GREEDY)))
            current = tokens_of(session)
            assert current == tokens_of(other)
            assert engine.kv_last(0) == len(current) - 1
            longer = [*current, 9, 10]
            session.drafts.drafter = None
            again, plain = (list(generate(item, Request(longer, 4, GREEDY))) for item in (session, other))
            assert ids(again) == ids(plain)
            assert again[-1].usage == plain[-1].usage
            assert again[-1].usage.cached_tokens == len(current)


def test_counters_and_the_end_are_the_same(llama: Engine, synthetic: Synthetic) -> None:
    """At the last token that was asked for, at a stop string, and at the end of the context."""
    with Engine(synthetic("llama", "q8_0"), replace(OPTIONS, outputs=MOST_ROWS)) as engine:
        endless = replace(GREEDY, grammar="root ::= [a-z] root")
        text = "".join(r.text for r in run(llama, PROMPT, None, max_tokens=12))
        for sampling, more in (
            (GREEDY, {"max_tokens": 11}),
            (GREEDY, {"max_tokens": 1}),
            (GREEDY, {"stop": [text[6:9]]}),
            (endless, {"max_tokens": None}),
        ):
            expected = run(llama, PROMPT, None, sampling, **more)
            known = Known({tuple(PROMPT): ids(expected) + [7] * 20}, 5)
            result = run(engine, PROMPT, speculate(known), sampling, **more)
            assert [(r.text, r.token_id, r.finish_reason, r.usage) for r in result] == [
                (r.text, r.token_id, r.finish_reason, r.usage) for r in expected
            ]


def test_penalties_and_grammars_hold(llama: Engine, synthetic: Synthetic) -> None:
    with Engine(synthetic("llama", "q8_0"), replace(OPTIONS, outputs=MOST_ROWS)) as engine:
        for sampling in (
            replace(GREEDY, repeat_penalty=1.3),
            replace(GREEDY, grammar="root ::= [a-z] root"),
            replace(GREEDY, grammar="root ::= [a-z] root", repeat_penalty=9.0),
            SamplingParams(temperature=1.2, seed=11),
        ):
            expected = ids(run(llama, PROMPT, None, sampling))
            for wrong in (0, 2):
                known = Known({tuple(PROMPT): expected}, wrong)
                assert ids(run(engine, PROMPT, speculate(known), sampling)) == expected


def test_a_shifted_context_goes_on_the_same() -> None:
    """The context is full several times in one answer."""
    with Engine(MODEL_PATH, replace(ROOM, context=96)) as engine:
        texts = []
        endless = replace(GREEDY, grammar="root ::= [a-z ] root", allow_repetition=True)
        for drafter in (None, speculate(NgramDrafts())):
            chat = Chat(engine, system="Answer briefly.", drafter=drafter)
            responses = list(chat.ask("Count from one to ten.", endless, max_tokens=300))
            texts.append(("".join(r.text for r in responses), responses[-1].usage.dropped_tokens))
        assert texts[0] == texts[1]
        assert texts[0][1] > 96


@pytest.mark.parametrize("temperature", [1.0, *thorough(0.5, 2.0)])
def test_samples_are_of_the_models_own_distribution(synthetic: Synthetic, temperature: float) -> None:
    """Pairs of tokens after a prompt, with drafts and without, from other seeds: a chi-square test of equality."""
    with Engine(synthetic("llama", "q8_0"), replace(OPTIONS, outputs=MOST_ROWS)) as engine:
        likely = ids(run(engine, PROMPT, None, max_tokens=3))
        known = speculate(Known({tuple(PROMPT): likely}))
        counts = []
        for drafter, seeds in ((None, range(1500)), (known, range(10_000, 11_500))):
            result: Counter[tuple[int, ...]] = Counter()
            session = one_slot(engine, drafter)
            for seed in seeds:
                sampling = SamplingParams(temperature=temperature, top_k=3, top_p=1, min_p=0, seed=seed)
                answer = generate(session, Request(PROMPT, 2, sampling))
                result[tuple(ids(list(answer)))] += 1
            counts.append(result)
    same_distribution(*counts)


def test_it_is_told_where_another_one_used_the_model_meanwhile(llama: Engine) -> None:
    answer = generate(one_slot(llama, speculate(NgramDrafts())), Request(PROMPT, None, GREEDY))
    next(answer)
    run(llama, [7, 8, 9], None)
    with pytest.raises(EngineError, match=USED_MEANWHILE[:30]):
        list(answer)


def test_what_a_cache_cannot_forget_is_computed_again(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(run(llama, PROMPT, None))
    with monkeypatch.context() as patch:
        forgotten: list[int] = []
        remove = llama.kv_remove

        def whole(sequence: int, start: int, end: int = -1) -> bool:
            forgotten.append(start)
            return start == 0 and remove(sequence, start, end)

        patch.setattr(llama, "kv_remove", whole)
        slot = Slot(llama)
        slot.prefill(PROMPT)
        slot.decode([expected[0]])
        slot.forget(1)
        assert slot.tokens == PROMPT
        assert forgotten[-2:] == [len(PROMPT), 0]
        assert int(slot.decode([expected[0]]).argmax()) == expected[1]
        forgotten.clear()
        known = Known({tuple(PROMPT): expected}, 2)
        assert ids(run(llama, PROMPT, speculate(known))) == expected
        assert llama.outputs == 1 or max(forgotten) > len(PROMPT)


def test_an_answer_with_drafts_outlives_its_engine(prompts: list[list[int]], plain: Answers) -> None:
    """The engine that takes over knows nothing of drafts that were wrong."""
    with ExitStack() as stack:
        engines = [stack.enter_context(Mortal(MODEL_PATH, ROOM)) for _ in range(2)]
        engines[0].lives = 5  # type: ignore[attr-defined]
        survivor = replaceable(engines[0], lambda _: engines[1])
        drafter = speculate(Known(plain, 2))
        for prompt in prompts[:2]:
            assert ids(run(survivor, prompt, drafter)) == plain[tuple(prompt)]
        assert survivor.replacements.recoveries == 1


def test_layers_that_cannot_forget_are_left_alone(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent model: `auto` drafts nothing, and who asks for drafts is told."""
    monkeypatch.setattr(llama.model, "is_recurrent", True)
    assert ids(run(llama, PROMPT, speculate(Known({}), choice=always()))) == ids(run(llama, PROMPT, None))
    assert speculation("auto", llama, _no_engine) is None
    with pytest.raises(EngineError, match=r"recurrent layers.*--draft off"):
        speculation("ngram", llama, _no_engine)


def _no_engine(engine: Engine) -> Engine:
    raise AssertionError("no engine is needed")


def test_what_can_be_asked_for(llama: Engine, synthetic: Synthetic) -> None:
    assert speculation("off", llama, _no_engine) is None
    for request in ("auto", "ngram"):
        result = speculation(request, llama, _no_engine)
        assert result is not None
        assert result.name == "ngram"
    model = ModelFile.open(MODEL_PATH)
    assert drafts("ngram", model) == "ngram"
    small = drafts(str(MODEL_PATH), model)
    assert isinstance(small, ModelFile)
    assert small.path == MODEL_PATH
    with ExitStack() as stack:
        drafter = speculation(ModelFile.open(synthetic("llama", "f16")), llama, stack.enter_context)
        assert drafter is not None
        assert drafter.name == "llama-f16.gguf"
        assert ids(run(llama, PROMPT, drafter)) == ids(run(llama, PROMPT, None))


def test_a_model_of_other_tokens_cannot_draft(llama: Engine) -> None:
    with pytest.raises(EngineError, match=r"edge-demo-q8_0.gguf cannot draft for llama-q8_0.gguf.*use a smaller"):
        speculation(ModelFile.open(MODEL_PATH), llama, _no_engine)


def test_a_model_of_few_bits_cannot_draft_for_itself(fewer_bits: ModelFile) -> None:
    with pytest.raises(EngineError, match="cannot draft for itself: in q2_k its size would still be"):
        drafts("self", fewer_bits)


def test_there_is_room_for_the_logits(synthetic: Synthetic) -> None:
    assert with_room(OPTIONS, "off") == OPTIONS
    assert with_room(OPTIONS, "auto").outputs == MOST_ROWS
    assert with_room(replace(OPTIONS, batch=4), "ngram").outputs == 4
    assert with_room(replace(OPTIONS, outputs=16), "ngram").outputs == 16
    budget = replace(OPTIONS, memory=1 << 30)
    assert with_room(budget, "ngram").reserved == 0
    small = ModelFile.open(synthetic("llama", "f16"))
    assert with_room(budget, small).reserved > small.size_bytes
    few, many = (_parts(replace(OPTIONS, outputs=outputs)) for outputs in (1, MOST_ROWS))
    vocabulary = 4 * 7 * _n_vocab()
    assert sum(many.values()) - sum(few.values()) >= 2 * vocabulary  # llama.cpp's, and those that `decode` gives


def _parts(options: EngineOptions) -> dict[str, int]:
    with paged(MODEL_PATH, 512 * MIB, options) as engine:
        return dict(engine.memory.parts)


def _n_vocab() -> int:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        return engine.model.n_vocab


def test_figures_of_an_answer(synthetic: Synthetic) -> None:
    """By a clock that goes on by a second with each look: a pass takes one, whatever its rows."""
    seconds = iter(range(1_000_000))
    with Engine(synthetic("llama", "f32"), replace(OPTIONS, outputs=MOST_ROWS)) as engine:
        answer = ids(run(engine, PROMPT, None, max_tokens=64))
        known = Known({tuple(PROMPT): answer})
        drafter = Speculation(lambda: known, "known", clock=lambda: float(next(seconds)))
        assert ids(run(engine, PROMPT, drafter, max_tokens=64)) == answer
    figures = drafter.to_json()
    assert figures["draft"] == "known"
    assert figures["accepted"] == figures["drafted"] == 63 - figures["passes"]
    assert figures["passes"] < 20
    assert figures["rows_per_pass"] == pytest.approx(63 / figures["passes"])
    assert figures["gain"] == pytest.approx(63 / figures["passes"])
    assert str(drafter.stats).startswith(f"{figures['drafted']} of {figures['drafted']} drafted tokens accepted")
    drafter.begin()
    assert drafter.to_json() == {
        "draft": "known", "draft_worker": None, "draft_worker_lost": False,
        "drafted": 0, "accepted": 0, "passes": 0, "rows_per_pass": None, "gain": None,
    }  # fmt: skip
