"""Test drafts by a model's own layers (MTP): the results of these layers on every engine, and errors if a model has
none. Acceptance is set by the tests, because drafts of random layers are right only by chance.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError, NotEnoughMemory
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.interface import TextEngine
from edge.llm.options import PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.speculate import mtp
from edge.speculate.choice import MOST_ROWS
from edge.speculate.factory import MtpDraft, drafts, speculation, with_room
from edge.speculate.mtp import MtpDrafts, Predictor, mtp_bytes, open_predictor
from edge.speculate.small_model import DraftPace
from edge.speculate.speculation import FEW, Speculation
from edge.tasks import SILENT
from partition.model.file import ModelFile
from tests.conftest import OPTIONS, Synthetic
from tests.support.adapters import write_adapter
from tests.support.deployments import pipeline, stages, tensor
from tests.support.drafting import (
    GREEDY,
    ROOM,
    AlwaysWindows,
    always,
    ids,
    one_slot,
    run,
    same_but_for_ties,
    same_distribution,
)
from tests.support.mtp import ARCHITECTURES, PROMPT, drafts_by_llama_cpp, plant, with_predictor
from tests.support.paging import ALL_FITS, halfway, least, paged
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import replaceable
from tests.support.thorough import thorough

# Without experts: passes of other sizes round otherwise, and random weights choose other experts for that.
LARGE_ENOUGH_TO_PAGE = {"embd": 256, "ff": 512, "dense_layers": 4}
PAGED = replace(ROOM, batch=16, memory=ALL_FITS)
ON: dict[str, Callable[[Path, Path], AbstractContextManager[TextEngine]]] = {
    "one device": lambda path, _: Engine(path, ROOM),
    "paged": lambda path, _: paged(path, least(path, PAGED), PAGED),
    "tensor": lambda path, folder: ranks_here(path, tensor(1, 1), ROOM, folder),
    "stages": lambda path, folder: ranks_here(path, pipeline(1, 1), ROOM, folder),
    "thin owner": lambda path, folder: ranks_here(path, pipeline(0, 1), ROOM, folder),
    "2 x 2": lambda path, folder: ranks_here(path, stages(2, 2), ROOM, folder),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def speculating(predictor: Predictor, rows: int = 4, **how: Any) -> Speculation:
    """Drafts of a predictor in passes of so many rows."""
    pace = DraftPace()
    return Speculation(lambda: MtpDrafts(predictor, pace), "mtp", **{"choice": always(rows), **how})


def text(tokens: list[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("arch", [ARCHITECTURES[0], ARCHITECTURES[1], *thorough(*ARCHITECTURES[2:])])
def test_drafts_are_those_of_llama_cpp(folder: Path, arch: str) -> None:
    """The drafts of a text computed at once, of one that goes on, and of one that changes from a place on; also behind
    drafts that are taken to be right. Of several texts at once."""
    path = with_predictor(folder, arch)
    with Engine(path, replace(ROOM, sequences=2)) as engine, open_predictor(engine) as predictor:
        assert engine.shape.n_layers == 4
        for sequence, history in ((0, PROMPT), (1, PROMPT[::-1])):
            engine.decode(history[:-1], 0, sequence=sequence)
            expected = drafts_by_llama_cpp(path, history, 5)
            assert predictor.propose(sequence, text(history), 0, 3) == expected[:3]
            assert predictor.propose(sequence, text(history), 0, 2, expected[:3]) == expected[3:]
            assert predictor.propose(sequence, text(history), 0, 5) == expected
        longer = [*PROMPT, 7, 8, 9, 250]
        engine.decode(longer[len(PROMPT) - 1 : -1], len(PROMPT) - 1)
        assert predictor.behind(0, text(longer), 0, whole=True) == 3
        assert predictor.propose(0, text(longer), 0, 4) == drafts_by_llama_cpp(path, longer, 4)
        other = [*PROMPT[:4], 99, 98, 97, 96, 95]
        start = 4 if engine.kv_remove(0, 4) else 0
        engine.kv_remove(0, start)  # recurrent layers cannot forget a part
        engine.decode(other[start:-1], start)
        assert predictor.propose(0, text(other), 0, 4) == drafts_by_llama_cpp(path, other, 4)
        assert predictor.propose(1, text(PROMPT[::-1]), 0, 3) == drafts_by_llama_cpp(path, PROMPT[::-1], 3)
        assert predictor.propose(0, text([1, 2, 3]), 0, 3) == []  # another text than what was computed


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
def test_a_text_that_goes_on_keeps_what_its_drafts_attend_to(folder: Path, arch: str) -> None:
    """In a hybrid model, too: drafts leave the predictor's cache, and the text before them stays."""
    path = with_predictor(folder, arch)
    history = [int(token) for token in np.random.default_rng(3).integers(4, 320, 48)]
    with Engine(path, ROOM) as engine, open_predictor(engine) as predictor:
        engine.decode(history[:16], 0)
        predictor.take_in(0, text(history[:17]), 0, whole=True)
        for n in range(17, 49):
            assert len(predictor.propose(0, text(history[:n]), 0, 3)) == 3
            assert (predictor._computed[0][0], len(predictor._computed[0][1])) == (1, n - 1)
            if n < 48:
                engine.decode(history[n - 1 : n], n - 1)
        state = predictor._chains[0].state
        drafts_of_parts = predictor.propose(0, text(history), 0, 3)
        predictor._computed.clear()
        predictor._chains.clear()
        predictor.take_in(0, text(history), 0, whole=True)
        assert predictor.propose(0, text(history), 0, 3) == drafts_of_parts
        assert np.abs(predictor._chains[0].state - state).max() < 1e-2 * state.std()


def test_hidden_states_matter(folder: Path) -> None:
    """A predictor that is given others drafts something else."""
    path = with_predictor(folder)
    with Engine(path, ROOM) as engine, open_predictor(engine) as predictor:
        engine.decode(PROMPT[:-1], 0)
        before = predictor.propose(0, text(PROMPT), 0, 8)
        first, rows = predictor.hidden.behind(0, text(PROMPT), 0)
        at = np.arange(first, first + len(rows), dtype=np.int32)
        predictor.hidden.add(text(PROMPT[first:-1]), at, 0 * at, -rows.copy())
        predictor._computed.clear()
        predictor._chains.clear()
        assert predictor.propose(0, text(PROMPT), 0, 8) != before


@pytest.mark.parametrize("where", ["one device", "paged", "tensor", "stages", "thin owner", *thorough("2 x 2")])
def test_greedy_answers_are_the_same(folder: Path, tmp_path: Path, where: str) -> None:
    """With drafts that are right half of the time, and with those that are made of random weights."""
    path = with_predictor(folder, "deepseek2", **LARGE_ENOUGH_TO_PAGE) if where == "paged" else with_predictor(folder)
    prompts = [PROMPT, [*PROMPT, 3, 1, 4]]
    with Engine(path, ROOM) as plain:
        answers = {tuple(prompt): ids(run(plain, prompt, None, max_tokens=40)) for prompt in prompts}
    with ON[where](path, tmp_path) as engine, open_predictor(engine) as predictor:
        drafter = speculating(predictor)
        assert {tuple(p): ids(run(engine, p, drafter, max_tokens=40)) for p in prompts} == answers
        assert drafter.stats.drafted > 60
        assert where != "paged" or (engine.paging and engine.paging.stats().decode.bytes_per_token > 1 << 20)
        drafted = plant(predictor, answers, 0.5)
        drafter = speculating(predictor)
        accepted = 0
        for prompt in prompts:
            assert ids(run(engine, prompt, drafter, max_tokens=40)) == answers[tuple(prompt)]
            accepted += drafter.stats.accepted
        assert drafted() > 40
        assert accepted > 8
        if engine.stages > 1:
            windows = AlwaysWindows(2, 3)
            plant(predictor, answers, 0.9)
            drafter = speculating(predictor, choice=lambda: windows)
            for prompt in prompts:
                assert ids(run(engine, prompt, drafter, max_tokens=40)) == answers[tuple(prompt)]
            assert windows.behind > 2
            assert windows.cancelled


def test_stages_give_the_hidden_states_that_one_device_has(folder: Path, tmp_path: Path) -> None:
    """Hidden states: of ranks of one stage those of all rows; over stages those that give logits, behind these."""
    path = with_predictor(folder)
    answer = [7, 8, 9]
    heard: dict[int, list[tuple[list[int], list[int], np.ndarray[Any, Any]]]] = {1: [], 2: []}
    for how in (tensor(1, 1), pipeline(1, 1)):
        with ranks_here(path, how, ROOM, tmp_path) as engine, open_predictor(engine) as predictor:
            steps, add = heard[engine.stages], predictor.hidden.add

            def hear(tokens: Any, positions: Any, own: Any, rows: Any, steps: Any = steps, add: Any = add) -> None:
                steps.append((tokens.tolist(), positions.tolist(), rows.copy()))
                add(tokens, positions, own, rows)

            engine.listen(hear)
            engine.decode(PROMPT, 0, top=1)
            engine.decode(answer[:-1], len(PROMPT), outputs="all", top=1)
            if engine.stages == 1:
                expected = drafts_by_llama_cpp(path, [*PROMPT, *answer], 3)
                assert predictor.propose(0, text([*PROMPT, *answer]), 0, 3) == expected
    assert [(tokens, positions) for tokens, positions, _ in heard[1]] == [(PROMPT, [*range(8)]), ([7, 8], [8, 9])]
    assert [(tokens, positions) for tokens, positions, _ in heard[2]] == [(PROMPT[-1:], [7]), ([7, 8], [8, 9])]
    for (_, _, first), (_, _, other) in zip(heard[1], heard[2], strict=True):
        assert np.allclose(first[-len(other) :], other, atol=2e-2)  # what crosses between stages has 16 bits
        assert other.std() > 0.5


@pytest.mark.parametrize("temperature", [1.0, *thorough(0.5, 2.0)])
def test_samples_are_of_the_models_own_distribution(folder: Path, temperature: float) -> None:
    """Pairs of tokens after a prompt, with drafts, half of which are right, and without, from other seeds."""
    with Engine(with_predictor(folder, layers=1, embd=32, ff=32), ROOM) as engine, open_predictor(engine) as predictor:
        likely = ids(run(engine, PROMPT, None, max_tokens=3))
        plant(predictor, {tuple(PROMPT): likely}, 0.7)
        counts = []
        for drafter, seeds in ((None, range(900)), (speculating(predictor), range(10_000, 10_900))):
            pairs: Counter[tuple[int, ...]] = Counter()
            session = one_slot(engine, drafter)
            for seed in seeds:
                sampling = SamplingParams(temperature=temperature, top_k=3, top_p=1, min_p=0, seed=seed)
                pairs[tuple(ids(list(generate(session, Request(PROMPT, 2, sampling)))))] += 1
            counts.append(pairs)
        assert drafter is not None
        assert drafter.stats.drafted
    same_distribution(*counts)


def test_requests_that_share_steps(folder: Path) -> None:
    """Each is drafted from its own hidden states. Those that the context has no room for are preempted, and go on."""
    path = with_predictor(folder)
    requests = [Request([*PROMPT[i:], *PROMPT[:i]], 60, GREEDY, ends=False) for i in range(4)]
    with Engine(path, replace(ROOM, sequences=4, context=128)) as engine:
        with Scheduler(engine) as scheduler:
            plain = scheduler.run(requests)
        with open_predictor(engine) as predictor:
            answers = {tuple(request.prompt): tokens for request, tokens in zip(requests, plain, strict=True)}
            plant(predictor, answers, 0.6)
            drafter = speculating(predictor)
            with Scheduler(engine, drafter=drafter) as scheduler:
                results = scheduler.run(requests)
                assert scheduler.queues.preemptions["foreground"]
            assert drafter.stats.accepted > 20
        for request, expected, result in zip(requests, plain, results, strict=True):
            same_but_for_ties(engine, request, expected, result)


def test_a_kept_prompt_and_another_engine(folder: Path, tmp_path: Path) -> None:
    """A restored prompt has no hidden states: drafts begin behind it. Another engine that takes over is heard."""
    path = with_predictor(folder)
    long = [int(token) for token in np.random.default_rng(1).integers(4, 320, 150)]
    prefixes = PrefixOptions(1 << 24, tmp_path / "prefixes", tmp_path / "key")
    with ExitStack() as stack:
        with Engine(path, replace(ROOM, prefixes=prefixes)) as engine:
            answer = ids(run(engine, long, None, max_tokens=30))
        engines = [stack.enter_context(Engine(path, replace(ROOM, prefixes=prefixes))) for _ in range(2)]
        lost = replaceable(engines[0], lambda _: engines[1])
        predictor = stack.enter_context(open_predictor(lost))
        drafter = speculating(predictor)
        session = one_slot(lost, drafter)
        responses = list(generate(session, Request(long, 30, GREEDY)))
        assert ids(responses) == answer
        assert session.slots.all[0].restored > 64
        assert drafter.stats.drafted > 30
        lost.replacements.switch_to(lambda: engines[1])
        again = list(generate(session, Request([*long, *answer, 5], 8, GREEDY)))
        assert len(ids(again)) == 8
        assert lost.replacements.moves == 1
        assert engines[1].listener is not None
        assert drafter.stats.drafted > 8


def test_a_long_text_is_seen_at_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes no more room than there is: of the first tokens, half of what may be held at a time is let go."""
    monkeypatch.setattr(mtp, "MOST_TOKENS", 48)
    path = with_predictor(folder)
    with Engine(path, ROOM) as engine:
        request = Request(PROMPT, 200, GREEDY, ends=False)
        [answer] = one_slot(engine).run([request])
        with open_predictor(engine) as predictor:
            plant(predictor, {tuple(PROMPT): answer}, 0.7)
            drafter = speculating(predictor, 8)
            scheduler = one_slot(engine, drafter)
            assert scheduler.run([request]) == [answer]
            ((first, tokens),) = predictor._computed.values()
            assert len(tokens) <= 48
            assert first > 100
            assert drafter.stats.drafted > 200


def test_a_shorter_text_comes_after_a_long_one(folder: Path) -> None:
    """A text of which the end alone was taken in, behind all of the shorter one."""
    path = with_predictor(folder)
    history = [int(token) for token in np.random.default_rng(1).integers(4, 320, 60)]
    with Engine(path, ROOM) as engine, open_predictor(engine) as predictor:
        engine.decode(history[:-1], 0)
        assert len(predictor.propose(0, text(history), 0, 3)) == 3
        assert predictor._computed[0][0] > len(PROMPT)
        engine.kv_remove(0, 0)
        engine.decode(PROMPT[:-1], 0)
        assert predictor.behind(0, text(PROMPT), 0, whole=False) == len(PROMPT) - 2
        assert predictor.propose(0, text(PROMPT), 0, 4) == drafts_by_llama_cpp(path, PROMPT, 4)


def test_there_is_room_for_a_text_that_went_on_without_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held tokens make way for what follows, before that is computed: llama.cpp gives cells in steps of 256."""
    monkeypatch.setattr(mtp, "MOST_TOKENS", 248)
    monkeypatch.setattr(mtp, "_AHEAD", 8)
    history = [int(token) for token in np.random.default_rng(2).integers(4, 320, 481)]
    options = replace(ROOM, context=512, batch=256)
    with Engine(with_predictor(folder), options) as engine, open_predictor(engine) as predictor:
        for first, last in ((0, 240), (240, 480)):
            engine.decode(history[first:last], first)
            start = max(0, last + 1 - 248)
            own = text(history[start : last + 1])
            predictor.take_in(0, own, start, whole=True)
            assert len(predictor.propose(0, own, start, 8)) == 8
        first, tokens = predictor._computed[0]
        assert first + len(tokens) == 481
        assert 124 <= len(tokens) <= 248


def test_a_pass_of_which_all_drafts_were_right_goes_on_with_the_text(folder: Path) -> None:
    """Sixteen tokens are new then, more than a trial takes in."""
    history = [int(token) for token in np.random.default_rng(3).integers(4, 320, 60)]
    with Engine(with_predictor(folder), ROOM) as engine, open_predictor(engine) as predictor:
        engine.decode(history[:-1], 0)
        predictor.take_in(0, text(history[:-MOST_ROWS]), 0, whole=True)
        assert predictor.behind(0, text(history), 0, whole=False) == MOST_ROWS
        assert len(predictor.propose(0, text(history), 0, 3)) == 3
        assert predictor._computed[0][0] == 1


def test_the_text_is_taken_in_as_far_as_it_pays(folder: Path) -> None:
    """By a clock of the test: a trial takes the last twelve tokens in, and all of them once that pays."""
    path = with_predictor(folder)
    history = [int(token) for token in np.random.default_rng(1).integers(4, 320, 100)]
    now = iter(range(1000))
    with Engine(path, replace(ROOM, batch=128)) as engine, open_predictor(engine) as predictor:
        engine.decode(history[:-1], 0)

        class TextSlot:
            prompt, answer, left, tokens, sequence = history, [], 9, history, 0

        own = MtpDrafts(predictor, DraftPace(), lambda: float(next(now)))
        own.attach(TextSlot())
        requests: list[float] = []
        assert own.behind_s == 0.0  # nobody knows yet
        assert own.catch_up(lambda seconds: bool(requests.append(seconds))) == 1.0
        assert (requests, predictor._computed[0][0]) == ([0.0], 87)
        assert len(own.draft(3)) == 3
        assert own.behind_s == 0.0
        assert own.catch_up(lambda seconds: bool(requests.append(seconds)) or seconds == 98 / 12) == 1.0
        assert requests[1:] == [98 / 12]
        assert predictor._computed[0][0] == 1
        assert own.draft(4) == drafts_by_llama_cpp(path, history, 4)
        assert own.catch_up(lambda _: True) == 0.0


def test_what_can_be_asked_for(folder: Path, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the layers where there are some, outside of a budget, where memory is left."""
    path = with_predictor(folder)
    file, without = ModelFile.open(path), ModelFile.open(synthetic("llama", "f16"))
    assert drafts("mtp", file) == MtpDraft(file)
    assert drafts("auto", file) == MtpDraft(file, is_auto=True)
    assert drafts("auto", without) == "auto"
    assert drafts("ngram", file) == "ngram"
    with pytest.raises(EngineError, match=r"llama-f16.gguf cannot draft by its own layers: it has no layers that"):
        drafts("mtp", without)
    with pytest.raises(ValueError, match="a worker drafts by a model"):
        drafts("mtp", file, worker="pi.local")
    budget = replace(OPTIONS, memory=1 << 30)
    assert with_room(budget, MtpDraft(file)).draft_bytes == mtp_bytes(file, 1) > 100_000
    assert with_room(budget, MtpDraft(file, is_auto=True)).draft_bytes == 0
    assert mtp_bytes(file, 4) > mtp_bytes(file, 1)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(path, ROOM))
        for draft, name in ((MtpDraft(file), "mtp"), (MtpDraft(file, is_auto=True), "mtp")):
            drafter = speculation(draft, engine, stack.enter_context)
            assert drafter is not None
            assert drafter.to_json()["draft"] == name
        said: list[str] = []
        monkeypatch.setattr(SILENT, "say", said.append)
        monkeypatch.setattr(mtp, "available_memory", lambda: 1000)
        drafter = speculation(MtpDraft(file, is_auto=True), engine, stack.enter_context)
        assert drafter is not None
        assert drafter.name == "ngram"
        assert "1000 B are available" in said[0] or "1,000" in said[0]
        with pytest.raises(NotEnoughMemory, match=r"free memory, or use --draft ngram"):
            speculation(MtpDraft(file), engine, stack.enter_context)
        monkeypatch.undo()
        monkeypatch.setattr(engine.model, "is_recurrent", True)
        assert speculation(MtpDraft(file, is_auto=True), engine, stack.enter_context) is None
        with pytest.raises(EngineError, match="recurrent layers"):
            speculation(MtpDraft(file), engine, stack.enter_context)
    with paged(path, least(path, PAGED), PAGED) as within, ExitStack() as stack:
        drafter = speculation(MtpDraft(file, is_auto=True), within, stack.enter_context)
        assert drafter is not None
        assert drafter.name == "ngram"


def test_a_paged_model_may_compute_before_its_layers_draft(folder: Path) -> None:
    """With hidden states its graph is another one, whose nodes are not those that were learned."""
    sizes = {
        "embd": 512,
        "ff": 512,
        "vocab": 2048,
        "experts": 16,
        "experts_used": 2,
        "expert_ff": 256,
        "dense_layers": 1,
    }
    path = with_predictor(folder, "deepseek2", **sizes)
    with paged(path, halfway(path, PAGED), PAGED) as engine:
        assert engine.paging is not None
        prompts = [PROMPT, PROMPT[::-1]]  # in turn, so that all rows are computed
        expected = [ids(run(engine, prompt, None, max_tokens=12)) for prompt in prompts]
        assert engine.paging.stats().decode.bytes_per_token > 0
        with open_predictor(engine) as predictor:
            for drafter in (None, speculating(predictor)):
                assert [ids(run(engine, prompt, drafter, max_tokens=12)) for prompt in prompts] == expected


@pytest.mark.parametrize("where", ["one device", "tensor", "stages"])
def test_answers_with_adapters_are_the_same(folder: Path, tmp_path: Path, where: str) -> None:
    """The layer drafts as without them; every token is chosen by the model with its adapter."""
    path = with_predictor(folder)
    weights = ("attn_q.weight", "attn_output.weight")
    of_drafts = {f"blk.4.{name}.lora_{side}" for name in weights for side in "ab"}  # which no pass of the model reads
    adapter = write_adapter(folder / "adapter.gguf", path, weights, size=1.0, drop=of_drafts)
    options = replace(ROOM, lora=(f"{adapter}:0",))
    with Engine(path, options) as whole:
        plain, expected = (
            one_slot(whole).run([Request(PROMPT, 24, GREEDY, ends=False, adapters=scales)])[0]
            for scales in ((), (1.0,))
        )
    assert plain != expected
    how = {"tensor": tensor(1, 1), "stages": pipeline(1, 1)}
    opened: AbstractContextManager[TextEngine]
    opened = ranks_here(path, how[where], options, tmp_path) if where in how else Engine(path, options)
    with ExitStack() as stack:
        engine = stack.enter_context(opened)
        predictor = stack.enter_context(open_predictor(engine))
        drafted = plant(predictor, {tuple(PROMPT): expected}, 0.7)
        drafter = speculating(predictor)
        assert one_slot(engine, drafter).run([Request(PROMPT, 24, GREEDY, ends=False, adapters=(1.0,))]) == [expected]
        assert drafted() > 0
        assert 0 < drafter.stats.accepted < drafter.stats.drafted


def test_more_sequences_than_places_evict_the_least_recently_used(folder: Path) -> None:
    with (
        Engine(with_predictor(folder), replace(ROOM, sequences=FEW + 1)) as engine,
        open_predictor(engine) as predictor,
    ):

        def propose(sequence: int) -> None:
            engine.kv_remove(sequence, 0)
            engine.decode(PROMPT[:-1], 0, sequence=sequence)
            assert len(predictor.propose(sequence, text(PROMPT), 0, 2)) == 2

        for sequence in range(FEW):
            propose(sequence)
        propose(0)
        propose(FEW)
        assert set(predictor._computed) == set(range(FEW + 1)) - {1}
        propose(1)
        assert set(predictor._computed) == set(range(FEW + 1)) - {2}
