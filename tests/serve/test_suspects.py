"""Test requests that crash the engine process: each is refused after its second crash; other requests are completed."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.api.config import EngineConfig
from edge.errors import EngineGone, PoisonousRequest
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.client import EngineClient
from edge.serve.engine_child import EngineChild
from edge.serve.http.errors import failure
from edge.serve.process import RESTARTS_IN_A_ROW
from edge.serve.router import Router
from edge.serve.served import Generation
from edge.serve.suspects import ENDS_IN_A_ROW, REFUSED_S, Case, Suspects

T = TypeVar("T")
CONFIG = EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=4, context=512), prefix_cache=0)
GREEDY = {"temperature": 0.0}
POISON = "poison"
WAIT_S = 120.0


def with_model(work: Callable[[EngineClient], Awaitable[T]]) -> T:
    async def run() -> T:
        router = Router({"demo": CONFIG})
        try:
            return await asyncio.wait_for(work(await router.model(None)), WAIT_S)
        finally:
            await router.close()

    with poison():
        return asyncio.run(run())


@contextmanager
def poison() -> Iterator[None]:
    """Let each process end as soon as it gets a request with the word, as native code does on a bad one."""
    send = EngineChild.send

    def deadly(child: EngineChild, message: Mapping[str, Any]) -> None:
        if POISON in json.dumps(message.get("with", {})):
            with suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGKILL)  # first: on a busy machine it would answer before it ends
        send(child, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineChild, "send", deadly)
        yield


def question(i: int, **options: Any) -> Generation:
    return Generation(messages=[{"role": "user", "content": f"What is {i} plus 2?"}], sampling=GREEDY, **options)


async def answer(model: EngineClient, generation: Generation) -> str:
    return "".join([piece.text async for piece in await model.generate(generation)])


ASKED: Mapping[str, Callable[[EngineClient], Awaitable[Any]]] = {
    "generate": lambda model: answer(model, Generation(prompt=POISON)),
    "chat": lambda model: answer(model, Generation(messages=[{"role": "user", "content": POISON}])),
    "tokenize": lambda model: model.tokenize(POISON),
    "render": lambda model: model.render([{"role": "user", "content": POISON}]),
    "embed": lambda model: model.embed([POISON]),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_request_that_ends_the_process_is_refused_at_its_second_try_and_then_at_once(what: str) -> None:
    async def work(model: EngineClient) -> int:
        for _ in range(5):  # more often than a model may be started in a row
            with pytest.raises(PoisonousRequest, match=r"killed by SIGKILL.* refused for 10 minutes"):
                await ASKED[what](model)
        assert await answer(model, question(3)) == "3 plus 2 is 5."
        return model.replicas.restarts

    assert with_model(work) == ENDS_IN_A_ROW


def test_requests_beside_the_one_that_ends_the_process_are_answered() -> None:
    async def work(model: EngineClient) -> tuple[list[Any], int]:
        others = [answer(model, question(i)) for i in range(4)]
        requests = (*others, model.tokenize("Hello"), model.embed(["Hello"]), ASKED["tokenize"](model))
        return await asyncio.gather(*requests, return_exceptions=True), model.replicas.restarts

    (*answers, tokens, embedded, refused), restarts = with_model(work)
    assert answers == [f"{i} plus 2 is {i + 2}." for i in range(4)]
    assert tokens
    assert len(embedded[0]) == 1
    assert isinstance(refused, PoisonousRequest)
    assert restarts <= ENDS_IN_A_ROW + 1


def test_an_answer_that_goes_on_beside_it_does_not_hide_the_request_that_ends_the_process() -> None:
    async def work(model: EngineClient) -> tuple[bool, int]:
        endless = await model.generate(Generation(prompt="Tell me", sampling={**GREEDY, "logit_bias": {4: -100.0}}))
        with pytest.raises(PoisonousRequest):
            await ASKED["tokenize"](model)
        endless.cancel()
        reasons = [piece.finish_reason async for piece in endless]
        return reasons[-1] in ("cancelled", "length"), model.replicas.restarts

    is_complete, restarts = with_model(work)
    assert is_complete
    assert restarts <= ENDS_IN_A_ROW + 1


def test_several_requests_that_end_the_process_leave_the_model_to_others() -> None:
    async def work(model: EngineClient) -> str:
        bad = [model.tokenize(f"{POISON} {i}") for i in range(RESTARTS_IN_A_ROW + 1)]
        good, *refused = await asyncio.gather(answer(model, question(5)), *bad, return_exceptions=True)
        assert all(isinstance(error, PoisonousRequest) for error in refused)
        assert model.replicas.failed is None
        return str(good)

    assert with_model(work) == "5 plus 2 is 7."


def test_a_client_that_leaves_before_the_process_ends_is_known_when_it_comes_again() -> None:
    async def work(model: EngineClient) -> str:
        for n_restarts in range(1, ENDS_IN_A_ROW + 1):
            tokenizing = asyncio.ensure_future(model.tokenize(POISON))
            while not model.replicas.processes[0].answers.suspects.handled:
                await asyncio.sleep(0)
            tokenizing.cancel()
            while model.replicas.restarts < n_restarts:
                await asyncio.sleep(0)
        with pytest.raises(PoisonousRequest):
            await model.tokenize(POISON)
        assert model.replicas.restarts == ENDS_IN_A_ROW
        return await answer(model, question(1))

    assert with_model(work) == "1 plus 2 is 3."


def test_an_idle_process_that_ends_each_time_makes_its_model_fail() -> None:
    async def work(model: EngineClient) -> None:
        for n_restarts in range(1, RESTARTS_IN_A_ROW + 2):
            await model.about()
            child = model.replicas.processes[0]._child
            assert child is not None
            os.kill(child.process.pid, signal.SIGKILL)
            while model.replicas.restarts < n_restarts:
                await asyncio.sleep(0)
        with pytest.raises(EngineGone, match=f"{RESTARTS_IN_A_ROW + 1} times in a row"):
            await model.tokenize("Hello")

    with_model(work)


def test_clients_do_not_repeat_a_refused_request_by_themselves() -> None:
    refused = failure(Suspects("demo").error("killed"))
    assert (refused.status, refused.code, refused.headers) == (400, "request_ends_engine", {})


# --- the rules, without processes ---


def case(text: str, what: str = "tokenize", **more: Any) -> Case:
    return Case(what, lambda: {"text": text, **more})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_of_several_is_found_by_asking_them_one_at_a_time() -> None:
    async def run() -> list[str]:
        suspects, order = Suspects("demo"), list[str]()
        cases = {name: case(name) for name in ("a", "b", "c")}
        assert suspects.ended(list(cases.values()), EngineGone("first")) is None

        async def ask(name: str) -> None:
            await suspects.turn(cases.setdefault(name, case(name)))
            assert not suspects.waits(cases[name])
            order.append(name)
            await asyncio.sleep(0)
            if name == "b":
                assert suspects.ended([cases[name]], EngineGone("second")) is cases[name]
            else:
                suspects.acquit(cases[name])

        await asyncio.wait_for(asyncio.gather(*(ask(name) for name in ("fresh", "a", "b", "c"))), WAIT_S)
        with pytest.raises(PoisonousRequest, match="second"):
            await suspects.turn(case("b"))
        for name in ("a", "c", "fresh"):
            await asyncio.wait_for(suspects.turn(case(name)), WAIT_S)
        return order

    assert asyncio.run(run()) == ["a", "b", "c", "fresh"]


def test_a_refusal_ends_after_its_time() -> None:
    async def run() -> None:
        clock = Clock()
        suspects, bad = Suspects("demo", clock), case("bad")
        for _ in range(ENDS_IN_A_ROW):
            await suspects.turn(bad)
            suspects.ended([bad], EngineGone("killed"))
        clock.now = REFUSED_S - 1
        with pytest.raises(PoisonousRequest):
            await suspects.turn(case("bad"))
        clock.now = REFUSED_S
        await asyncio.wait_for(suspects.turn(case("bad")), WAIT_S)

    asyncio.run(run())


@pytest.mark.parametrize("n_answered", [1, 3])
def test_only_crashes_without_an_answer_between_them_make_a_request_the_cause(n_answered: int) -> None:
    suspects, long = Suspects("demo"), case("long")
    for _ in range(n_answered):
        assert suspects.ended([long], EngineGone("killed")) is None
        suspects.acquit(long)
    for n_crashes in range(1, ENDS_IN_A_ROW + 1):
        assert suspects.ended([long], EngineGone("killed")) is (long if n_crashes == ENDS_IN_A_ROW else None)


def test_oldest_of_too_many_known_requests_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.serve.suspects._MOST_KNOWN", 3)

    async def run() -> list[bool]:
        suspects, refused = Suspects("demo"), []
        for number in range(5):
            bad = case(str(number))
            for _ in range(ENDS_IN_A_ROW):
                await suspects.turn(bad)
                suspects.ended([bad], EngineGone("killed"))
        for number in range(5):
            try:
                await suspects.turn(case(str(number)))
                refused.append(False)
            except PoisonousRequest:
                refused.append(True)
        return refused

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == [False, False, True, True, True]


def test_the_same_request_is_known_whoever_sends_it_with_whatever_seed() -> None:
    def digest(what: str = "generate", prompt: str = "x", **more: Any) -> bytes:
        return Case(what, lambda: {"prompt": prompt, **more}).digest()

    own = {"place": 1, "namespace": "a", "generated": [], "sampling": {"seed": 1, "top_k": 2}}
    others = {"place": 2, "namespace": "b", "generated": [5], "sampling": {"seed": 2, "top_k": 2}}
    assert digest(**own) == digest(**others)
    different = {digest(), digest("tokenize"), digest(prompt="y"), digest(sampling={"regex": "a"})}
    assert len(different) == 4


@given(st.lists(st.sampled_from(["ended", "left", "acquitted", "abandoned"]), max_size=8), st.integers(1, 4))
def test_whatever_becomes_of_suspects_nobody_waits_for_ever(ends: list[str], n: int) -> None:
    async def run() -> None:
        suspects = Suspects("demo")
        cases = [case(str(i)) for i in range(n)]
        suspects.ended(cases, EngineGone("killed"))
        remaining = list(ends)

        async def ask(item: Case) -> None:
            with suppress(PoisonousRequest):
                while not item.is_cause:
                    await suspects.turn(item)
                    await asyncio.sleep(0)
                    end = remaining.pop() if remaining else "acquitted"
                    if end == "ended":
                        suspects.ended([item], EngineGone("killed"))
                        continue
                    if end == "abandoned":  # its client leaves, and then the process that handles it ends
                        number = id(item)
                        suspects.handled[number] = item
                        suspects.abandon(number, item)
                        suspects.ended([*suspects.handled.values()], EngineGone("killed"))
                        return
                    (suspects.leave if end == "left" else suspects.acquit)(item)
                    return

        requests = (ask(item) for item in [case("fresh"), *cases, case("other")])
        await asyncio.wait_for(asyncio.gather(*requests), WAIT_S)
        assert not suspects.waits(case("new"))

    asyncio.run(run())
