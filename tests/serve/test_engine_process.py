"""Test engine processes: their commands, their end, and which of them are loaded."""

import asyncio
import gc
import os
import shutil
import signal
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest

from edge.api.config import EngineConfig
from edge.errors import ContextFull, EngineError, EngineGone, Overloaded, SamplingError, TemplateError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.serve import engine_child
from edge.serve.answer import ProcessAnswer
from edge.serve.caller import CALLER, Caller
from edge.serve.client import EngineClient
from edge.serve.engine.inputs import InputProcessor
from edge.serve.engine_child import EngineChild, spawn
from edge.serve.http import generating
from edge.serve.messages import generation_json
from edge.serve.process import EngineProcess
from edge.serve.router import Router
from edge.serve.served import Generation, Piece
from edge.serve.suspects import ENDS_IN_A_ROW, Case, Suspects
from edge.text.templates.template import CONTINUES, ChatTemplate
from partition.errors import PlanError
from quant.errors import ModelFileError
from tests.conftest import Synthetic
from tests.support import forked_modules
from tests.support.helpers import stand_still

T = TypeVar("T")
CONFIG = EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=3, context=512), prefix_cache=0)
# Sums whose order does not change what is chosen: where a sequence lies in the cache depends on the others.
GREEDY = {"temperature": 0.0}
ENDLESS = Generation(prompt="Tell me", sampling={**GREEDY, "logit_bias": {4: -100.0}})
WAIT_S = 60.0


def with_router(work: Callable[[Router], Awaitable[T]], config: EngineConfig = CONFIG, **options: Any) -> T:
    """Return what `work` gives of a router with the bundled model, within a minute."""

    async def run() -> T:
        router = Router({"demo": config}, **options)
        try:
            return await asyncio.wait_for(work(router), WAIT_S)
        finally:
            await router.close()

    return asyncio.run(run())


def running_child(model: EngineClient) -> EngineChild:
    assert model.replicas.processes[0]._child is not None
    return model.replicas.processes[0]._child


async def kill(model: EngineClient) -> None:
    """End its process, and return once that was noticed."""
    child = running_child(model)
    os.kill(child.process.pid, signal.SIGKILL)
    await child.listening


async def text(answer: ProcessAnswer) -> str:
    return "".join([piece.text async for piece in answer])


def question(i: int, **options: Any) -> Generation:
    message = {"role": "user", "content": f"What is {i} plus 2?"}
    return Generation(messages=[message], sampling=GREEDY, **options)


def test_requests_are_answered_together_and_each_as_alone() -> None:
    async def work(router: Router) -> tuple[list[str], dict[str, Any]]:
        model = await router.model(None)
        answers = await asyncio.gather(*(model.generate(question(i)) for i in range(8)))
        result = await asyncio.gather(*map(text, answers))
        assert [answer.prompt_tokens for answer in answers] == [12] * 8
        assert max(answer.cached_tokens for answer in answers) >= 3  # the beginning that all have
        return result, await model.status()

    outcome, status = with_router(work)
    assert outcome == [f"{i} plus 2 is {i + 2}." for i in range(8)]
    assert status["counters"]["prompt_tokens"] == 8 * 12
    assert 0 < status["counters"]["cached_tokens"] < 8 * 12
    assert status["counters"]["generated_tokens"] > 8 * 5
    assert (status["waiting"], status["slots"], status["restarts"]) == (0, [], 0)
    assert status["devices"][0]["layers"] == [0, 8]


def test_tokens_and_prompts_are_those_of_the_model() -> None:
    async def work(router: Router) -> Any:
        model = await router.model("demo")
        tokens = await model.tokenize("Hello <|user|>", parse_special=True)
        plain = await model.tokenize("Hello <|user|>")
        return tokens, plain, await model.pieces(tokens), await model.render([{"role": "user", "content": "hi"}])

    tokens, plain, pieces, prompt = with_router(work)
    assert len(tokens) < len(plain)
    assert b"".join(pieces) == b"Hello <|user|>"
    assert prompt == "<|bos|><|user|>hi<|end|><|assistant|>"


def test_texts_that_mean_the_like_are_embedded_alike() -> None:
    async def work(router: Router) -> Any:
        model = await router.model(None)
        with pytest.raises(ContextFull, match="1 to 1024 tokens, this one 0"):
            await model.embed([[]])
        return await model.embed(["What is a kilogram?", "What is a gram?", "Tell me a joke, please", [5, 6]])

    (kilogram, gram, joke, _), tokens = with_router(work)
    assert tokens > 12
    assert sum(x * x for x in kilogram) == pytest.approx(1, abs=1e-5)
    like, unlike = (sum(x * y for x, y in zip(kilogram, other, strict=True)) for other in (gram, joke))
    assert like > unlike + 0.2


WRONG = (
    (Generation(prompt="word " * 600), ContextFull, "the prompt has .* tokens, but .* may have 512"),
    (Generation(prompt=""), ContextFull, "the prompt is empty"),
    (Generation(prompt=[1, 5000]), SamplingError, "5000 is not a token"),
    (Generation(prompt="x", sampling={"temperature": -1.0}), SamplingError, "temperature"),
    (Generation(prompt="x", sampling={"json_schema": '{"not": {}}'}), SamplingError, "not"),
    (Generation(prompt="x", max_tokens=0), SamplingError, "max_tokens is 0"),
    (Generation(prompt="x", sampling={"stop": [""]}), SamplingError, "stop string"),
    (Generation(messages=[{"role": "user"}]), TemplateError, "content"),
)


def test_what_is_wrong_with_a_request_is_said_before_it_begins() -> None:
    async def work(router: Router) -> str:
        model = await router.model(None)
        for generation, error, why in WRONG:
            with pytest.raises(error, match=why):
                await model.generate(generation)
            assert not model.replicas.busy
        return await text(await model.generate(question(1)))

    assert with_router(work) == "1 plus 2 is 3."


def test_a_constraint_holds_through_the_process() -> None:
    async def work(router: Router) -> str:
        model = await router.model(None)
        sampling = {**GREEDY, "regex": r"\d{3}-[xyz]"}
        return await text(await model.generate(replace(question(1), sampling=sampling)))

    result = with_router(work)
    assert result[:3].isdigit()
    assert result[3:] in {"-x", "-y", "-z"}


def test_a_request_that_is_cancelled_ends_alone_and_within_a_step() -> None:
    async def work(router: Router) -> tuple[Sequence[Piece], str]:
        model = await router.model(None)
        endless, other = await model.generate(ENDLESS), await model.generate(question(4))
        pieces: list[Piece] = []
        async for piece in endless:
            pieces.append(piece)
            if len(pieces) == 3:
                endless.cancel()
        status = await model.status()
        assert len(status["slots"]) <= 1
        return pieces, await text(other)

    pieces, other = with_router(work)
    assert pieces[-1].finish_reason == "cancelled"
    assert len(pieces) < 100
    assert other == "4 plus 2 is 6."


def test_who_leaves_in_the_moment_of_acceptance_leaves_no_answer() -> None:
    async def work(router: Router) -> Sequence[Any]:
        model = await router.model(None)
        beginning, take = asyncio.ensure_future(model.generate(ENDLESS)), EngineChild._take

        def leaving(child: EngineChild, message: Any) -> None:
            take(child, message)
            if "prompt_tokens" in (message.get("result") or ()):
                beginning.cancel()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineChild, "_take", leaving)
            with pytest.raises(asyncio.CancelledError):
                await beginning
        slots: Sequence[Any] = (await model.status())["slots"]
        return slots

    assert with_router(work) == []


def test_answers_that_begin_though_their_request_was_given_up_are_cancelled() -> None:
    async def run() -> bool:
        answer = ProcessAnswer(ENDLESS)

        async def begin() -> Any:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return SimpleNamespace(answers=[answer])

        beginning = asyncio.ensure_future(begin())
        await asyncio.sleep(0)
        generating._end(beginning)
        await beginning
        await asyncio.sleep(0)
        return answer.cancelled

    assert asyncio.run(run())


def test_answers_go_on_with_the_same_tokens_where_the_process_is_killed(synthetic: Synthetic) -> None:
    path, said = synthetic("llama", "f32"), list[str]()
    exact = replace(CONFIG.options, kv_type="f32", flash_attention="off")
    config = EngineConfig(str(path), exact, prefix_cache=0)
    with Engine(path, config.engine_options()) as engine:
        ends = {token: -100.0 for token in range(engine.model.n_vocab) if engine.model.is_end(token)}
        sampling = {**GREEDY, "logit_bias": ends}
        request = Request([5, 6, 7], 120, SamplingParams(temperature=0, logit_bias=ends))
        [undisturbed] = Scheduler(engine).run([request])

    async def work(router: Router) -> tuple[list[list[int]], int]:
        model = await router.model(None)
        generation = Generation(prompt=[5, 6, 7], sampling=sampling, max_tokens=120)
        answers = [await model.generate(generation) for _ in range(5)]  # two of them wait

        async def collected(answer: ProcessAnswer) -> list[int]:
            tokens = []
            async for piece in answer:
                if piece.token_id is not None:
                    tokens.append(piece.token_id)
                if answer is answers[0] and len(tokens) in (20, 70):
                    while not all(item.accepted for item in answers):  # by this process, and not by the one before
                        await asyncio.sleep(0)
                    await kill(model)
            return tokens

        return await asyncio.gather(*map(collected, answers)), model.replicas.restarts

    result, restarts = with_router(work, config, say=said.append)
    assert result == [undisturbed] * 5
    assert len(undisturbed) == 120
    assert restarts == 2
    assert any("killed by SIGKILL" in line for line in said)


def test_a_request_that_ends_the_process_each_time_fails_and_the_next_is_answered() -> None:
    async def work(router: Router) -> str:
        model = await router.model(None)
        take, ended = EngineChild._take, list[int]()

        def dies(child: EngineChild, message: Any) -> None:
            """The process dies once it computes the request; what it said since is not heard."""
            if child.process.pid in ended:
                return
            take(child, message)
            if "begun" in message:
                ended.append(child.process.pid)
                os.kill(child.process.pid, signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineChild, "_take", dies)
            with pytest.raises(EngineGone, match="killed by SIGKILL"):
                await text(await model.generate(Generation(prompt="poison")))
        assert len(ended) == ENDS_IN_A_ROW
        return await text(await model.generate(question(3)))

    assert with_router(work) == "3 plus 2 is 5."


def test_a_request_that_only_waited_is_not_blamed_for_the_end_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    blamed: list[list[object]] = []
    ended = Suspects.ended

    def noted(suspects: Suspects, cases: Sequence[Case], reason: Exception) -> Case | None:
        blamed.append(list(cases))
        return ended(suspects, cases, reason)

    monkeypatch.setattr(Suspects, "ended", noted)

    async def work(router: Router) -> str:
        model = await router.model(None)
        endless, waiting = await model.generate(ENDLESS), await model.generate(question(3))
        await endless.pieces.get()
        await kill(model)
        assert blamed == [[endless.case]]
        await endless.pieces.get()
        endless.cancel()
        return await text(waiting)

    assert with_router(work, replace(CONFIG, options=replace(CONFIG.options, sequences=1))) == "3 plus 2 is 5."


def test_a_message_that_is_too_long_ends_the_process_and_the_next_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_child, forked_modules):  # whichever starts it
        monkeypatch.setattr(module, "MOST_LINE_BYTES", 64 << 10)

    async def work(router: Router) -> str:
        model = await router.model(None)
        with pytest.raises(EngineGone, match="it sent an invalid message"):
            await model.tokenize("a " * 100_000)
        return await text(await model.generate(question(3)))

    assert with_router(work) == "3 plus 2 is 5."


def test_texts_of_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=64)) as engine:
        inputs = InputProcessor(CONFIG, engine)
        tokens = inputs.tokens("Hello, hello", 64)
        pieces = inputs.pieces([*tokens, *tokens])
        assert "".join(pieces) == "Hello, helloHello, hello"
        monkeypatch.setattr("edge.serve.engine.inputs._MOST_PIECES", 23)
        assert inputs.pieces(tokens) == pieces[: len(tokens)]
        with pytest.raises(SamplingError, match="24 bytes of text, at most 23 are allowed"):
            inputs.pieces([*tokens, *tokens])
        inputs.close()


def test_an_answer_goes_on_behind_its_beginning() -> None:
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=128)) as engine:
        inputs = InputProcessor(CONFIG, engine)
        begun = {"role": "assistant", "content": "3 plus 2", CONTINUES: True}
        generation = replace(question(3), messages=[*(question(3).messages or ()), begun], max_tokens=20)
        request = inputs.request(generation_json(generation, []))
        answer = Scheduler(engine).run([replace(request, sampling=SamplingParams(temperature=0))])[0]
        assert b"".join(map(engine.model.piece, answer)) == b" is 5."
        inputs.template = ChatTemplate(f"{inputs.template.source}{{# </think> #}}", bos="<|bos|>")
        thinking = inputs.request(generation_json(generation, [])).thinking
        assert thinking is not None
        assert thinking.state == "answer"
        inputs.close()


def test_who_leaves_while_the_process_is_started_again_is_not_answered_there() -> None:
    async def work(router: Router) -> tuple[Sequence[Piece], str]:
        model = await router.model(None)
        endless = await model.generate(ENDLESS)
        pieces = [await endless.pieces.get()]
        await kill(model)  # it is requested again
        endless.cancel()
        results = [piece async for piece in endless]
        return [*pieces, *results], await text(await model.generate(question(6)))  # type: ignore[list-item]

    pieces, other = with_router(work)
    assert pieces[-1].finish_reason == "cancelled"
    assert other == "6 plus 2 is 8."


def test_too_many_are_refused_and_those_there_are_answered() -> None:
    async def work(router: Router) -> list[str]:
        model = await router.model(None)
        endless = [await model.generate(ENDLESS) for _ in range(4)]
        request = await model.generate(question(3))  # waits
        with pytest.raises(Overloaded, match="3 requests are running and 2 are waiting"):
            await model.generate(question(9))
        for answer in endless:
            answer.cancel()
        return [await text(request), *[await text(await model.generate(question(i))) for i in range(2)]]

    result = with_router(work, queue=2)
    assert result == ["3 plus 2 is 5.", "0 plus 2 is 2.", "1 plus 2 is 3."]


def test_one_key_leaves_places_in_the_queue_for_another() -> None:
    async def work(router: Router) -> list[str]:
        model = await router.model(None)
        answers = []
        for client, n in (("a", 5), ("b", 2)):  # of three that are answered and four that wait
            CALLER.set(Caller(client, client, among_several=True))
            answers += [await model.generate(ENDLESS if client == "a" else question(2)) for _ in range(n)]
            with pytest.raises(Overloaded):
                await model.generate(question(9))
        for answer in answers[:5]:
            answer.cancel()
        return [await text(answer) for answer in answers[5:]]

    assert with_router(work, queue=4) == ["2 plus 2 is 4."] * 2


def test_a_request_for_a_model_that_was_just_unloaded_is_told_so() -> None:
    async def work(router: Router) -> str:
        model = await router.model(None)
        assert await router.unload(None)
        with pytest.raises(EngineGone, match="was just unloaded; ask again"):
            await model.generate(question(3))
        return await text(await (await router.model(None)).generate(question(3)))

    assert with_router(work) == "3 plus 2 is 5."


def test_a_load_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment of its beginning: no socket, and no process."""
    monkeypatch.setattr(engine_child, "spawn", spawn)  # as people start it

    async def give_up(n_turns: int) -> None:
        router = Router({"demo": CONFIG})
        loading = asyncio.ensure_future(router.model(None))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await router.close()

    before = set(psutil.Process().children())
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n_turns in range(8):
            asyncio.run(give_up(n_turns))
            gc.collect()
    assert not [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert set(psutil.Process().children()) == before


def test_a_model_that_cannot_be_loaded_says_why_each_time(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))

    async def work(router: Router) -> None:
        for _ in range(2):
            with pytest.raises(ModelFileError, match="bad"):
                await router.model(None)
        with pytest.raises(ModelFileError, match="bad"):
            await router.model("other")  # there is one model

    with_router(work, EngineConfig(str(tmp_path / "bad.gguf")))


def test_models_are_let_go_where_another_needs_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(MODEL_PATH, tmp_path / "second.gguf")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 20}))

    async def run() -> list[str]:
        said: list[str] = []
        second = replace(CONFIG, path=str(tmp_path / "second.gguf"))
        router = Router({"first": CONFIG, "second": second, "third": CONFIG}, say=said.append)
        try:
            first = await router.model("first")
            endless = await first.generate(ENDLESS)
            pid = running_child(first).process.pid
            stand_still(pid)  # it does not answer while the others are loaded
            await router.model("second")
            assert {model.name for model in await router.loaded()} == {"first", "second"}  # the first is in use
            await router.model("third")
            assert {model.name for model in await router.loaded()} == {"first", "third"}
            os.kill(pid, signal.SIGCONT)
            endless.cancel()
            assert [piece.finish_reason async for piece in endless][-1] == "cancelled"
        finally:
            await router.close()
        return said

    assert any("second: unloaded because third needs the memory" in line for line in asyncio.run(run()))


def test_a_model_that_is_loaded_answers_while_another_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> str:
        may_load, start = asyncio.Event(), EngineProcess.start

        async def slowly(model: EngineProcess) -> None:
            if model.name == "second":
                await may_load.wait()
            await start(model)

        monkeypatch.setattr(EngineProcess, "start", slowly)
        router = Router({"first": CONFIG, "second": CONFIG})
        try:
            await router.model("first")
            loading = asyncio.create_task(router.model("second"))
            await asyncio.sleep(0)
            first = await asyncio.wait_for(router.model("first"), WAIT_S)
            result = await text(await first.generate(question(2)))
            assert not loading.done()
            may_load.set()
            assert (await loading).name == "second"
            return result
        finally:
            await router.close()

    assert asyncio.run(run()) == "2 plus 2 is 4."


def test_a_load_goes_on_without_its_client_unless_another_model_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        may_load, begun, starts, start = asyncio.Event(), asyncio.Event(), list[str](), EngineProcess.start

        async def slowly(model: EngineProcess) -> None:
            starts.append(model.name)
            begun.set()
            if model.name == "first":
                await may_load.wait()
            await start(model)

        async def give_up() -> None:
            begun.clear()
            loading = asyncio.create_task(router.model("first"))
            await begun.wait()
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading

        monkeypatch.setattr(EngineProcess, "start", slowly)
        router = Router({"first": CONFIG, "second": CONFIG})
        try:
            await give_up()
            again, other = (asyncio.create_task(router.model(name)) for name in ("first", "second"))
            await asyncio.sleep(0)
            assert starts == ["first"]
            again.cancel()
            await asyncio.wait_for(other, WAIT_S)
            assert starts == ["first", "second"]
            await give_up()
            may_load.set()
            await asyncio.wait_for(router.model("first"), WAIT_S)
            return starts
        finally:
            await router.close()

    assert asyncio.run(run()) == ["first", "second", "first"]


def test_nothing_is_left_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(router: Router) -> tuple[int, ProcessAnswer]:
        model = await router.model(None)
        return running_child(model).process.pid, await model.generate(ENDLESS)

    async def run() -> None:
        monkeypatch.setattr(engine_child, "EXIT_S", WAIT_S)  # it ends by itself, and is not killed
        router = Router({"demo": CONFIG})
        pid, answer = await work(router)
        children = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        await asyncio.wait_for(router.close(), WAIT_S)
        with pytest.raises(EngineGone, match="the server is ending"):
            await text(answer)
        assert psutil.wait_procs(children, WAIT_S)[1] == []

    asyncio.run(run())


def test_embeddings_of_a_model_within_a_budget_are_refused() -> None:
    async def work(router: Router) -> None:
        model = await router.model(None)
        assert (await model.status())["model"]["embeds"] is False
        with pytest.raises(EngineError, match="within a memory budget"):
            await model.embed(["text"])

    with_router(work, replace(CONFIG, options=replace(CONFIG.options, memory=400 << 20)))


def test_a_plan_that_is_none_changes_nothing() -> None:
    async def work(router: Router) -> str:
        model = await router.model(None)
        with pytest.raises(PlanError):
            await router.use_plan(None, {"format": "nonsense"})
        return await text(await model.generate(question(5)))

    assert with_router(work) == "5 plus 2 is 7."
