"""Test `for` and `async for` over answers: equal pieces, a free event loop, and the state after a cancellation."""

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest

from edge.errors import EngineError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.generate import Response
from edge.llm.model import Model
from edge.llm.pieces import Pieces
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from tests.conftest import Synthetic
from tests.support.deployments import EXACT

GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, grammar="root ::= [a-z] root")
QUESTIONS = ("My name is Ada.", "What is 27 plus 38?", "What is my name?")
WAIT_S = 30.0  # every wait of these tests ends well before this, unless the test fails


def random_prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(5, 200) for _ in range(n)]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("edge-pieces")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(("edge-pieces", "edge-requests")):
            thread.join(WAIT_S)  # a dropped iterator does not wait for its thread
            assert not thread.is_alive()


class Computation:
    """An engine whose pieces wait until they are released, or until it is stopped."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.released = threading.Event()
        self.started = threading.Event()

    def stop(self) -> None:
        self.log.append("stop")
        self.released.set()

    def resume(self) -> None:
        self.log.append("resume")

    def pieces(self) -> Pieces[int]:
        def compute() -> Iterator[int]:
            try:
                for number in range(3):
                    self.started.set()
                    assert self.released.wait(WAIT_S)
                    yield number
            finally:
                self.log.append("closed")

        return Pieces(compute(), self)


def test_the_event_loop_runs_while_a_piece_is_computed() -> None:
    computation = Computation()

    async def run() -> list[int]:
        async def release() -> None:
            while not computation.started.is_set():
                await asyncio.sleep(0)
            computation.released.set()

        releasing = asyncio.create_task(release())
        numbers = [number async for number in computation.pieces()]
        await releasing
        return numbers

    assert asyncio.run(run()) == [0, 1, 2]
    assert computation.log == ["closed"]


@pytest.mark.parametrize("n_cancels", [1, 3])
def test_a_cancelled_task_stops_its_piece_and_closes_the_iterator(n_cancels: int) -> None:
    computation = Computation()

    async def run() -> None:
        async def read() -> None:
            async for _ in computation.pieces():
                pytest.fail("a piece came after the cancellation")

        task = asyncio.create_task(read())
        while not computation.started.is_set():
            await asyncio.sleep(0)
        for _ in range(n_cancels):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert computation.log == ["stop", "resume", "closed"]

    asyncio.run(run())


def test_an_error_of_a_piece_is_raised_and_ends_the_iteration() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise EngineError("broken")

    async def run() -> None:
        pieces = Pieces(fails())
        assert await anext(pieces) == 1
        with pytest.raises(EngineError, match="broken"):
            await anext(pieces)
        assert [piece async for piece in pieces] == []
        assert own_threads() == []

    asyncio.run(run())


def test_an_iterator_is_closed_in_each_way(demo: Engine) -> None:
    async def run(chat: Chat) -> None:
        async with aclosing(chat.ask(QUESTIONS[0], ENDLESS, max_tokens=8)) as pieces:
            await anext(pieces)
        with chat.ask(QUESTIONS[1], ENDLESS, max_tokens=8) as pieces:
            await anext(pieces)
        async for _ in chat.ask(QUESTIONS[2], ENDLESS, max_tokens=8):
            break

    chat = Chat(demo)
    asyncio.run(run(chat))
    gc.collect()
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 3


def test_async_pieces_equal_sync_pieces(demo: Engine) -> None:
    rng = random.Random(7)
    for _ in range(4):
        params = SamplingParams(temperature=rng.choice([0, 0.8]), seed=rng.randrange(1000))
        prompt, n = random_prompt(rng, 40), rng.randrange(1, 20)
        model = Model(demo, lambda: None)
        expected = [(r.text, r.token_id, r.finish_reason) for r in model.generate(prompt, params, max_tokens=n)]

        async def read(model: Model, prompt: list[int], params: SamplingParams, n: int) -> list[object]:
            pieces = model.generate(prompt, params, max_tokens=n)
            return [(r.text, r.token_id, r.finish_reason) async for r in pieces]

        assert asyncio.run(read(model, prompt, params, n)) == expected


def test_async_conversation_equals_sync_conversation(demo: Engine) -> None:
    params = SamplingParams(temperature=0.7, seed=3)
    first, second = Chat(demo), Chat(demo)
    for question in QUESTIONS:
        list(first.ask(question, params, max_tokens=8))
    list(first.retry(None, params, max_tokens=6))

    async def talk() -> None:
        for question in QUESTIONS:
            async for _ in second.ask(question, params, max_tokens=8):
                pass
        async for _ in second.retry(None, params, max_tokens=6):
            pass

    asyncio.run(talk())
    assert second.messages == first.messages


def test_a_model_answers_like_a_fresh_one_after_each_cancellation(synthetic: Synthetic) -> None:
    rng = random.Random(11)
    options = replace(EXACT, context=300)
    path = synthetic("llama", "f32")
    prompt = random_prompt(rng, 60)
    with Engine(path, options) as engine, Model(engine, lambda: None) as fresh:
        expected = [r.token_id for r in fresh.generate(prompt, GREEDY, max_tokens=12)]

    async def cancel_after(model: Model, n_pieces: int) -> None:
        async def read(reached: asyncio.Event) -> None:
            count = 0
            if n_pieces == 0:
                reached.set()
            async for _ in model.generate(random_prompt(rng, 200), ENDLESS, max_tokens=50):
                count += 1
                if count == n_pieces:
                    reached.set()

        reached = asyncio.Event()
        task = asyncio.create_task(read(reached))
        await asyncio.wait_for(reached.wait(), WAIT_S)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def run(model: Model) -> None:
        for n_pieces in (0, 0, 1, 2, 5):
            await cancel_after(model, n_pieces)
            assert own_threads() == []
            assert [r.token_id async for r in model.generate(prompt, GREEDY, max_tokens=12)] == expected

    with Engine(path, options) as engine, Model(engine, lambda: None) as model:
        asyncio.run(run(model))


def test_a_cancelled_question_leaves_a_conversation_that_continues(demo: Engine) -> None:
    chat = Chat(demo)

    async def run() -> None:
        async def read() -> None:
            async for _ in chat.ask("What is 3 plus 4?", ENDLESS, max_tokens=200):
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    before = [dict(message) for message in chat.messages]
    answer = "".join(r.text for r in chat.ask("What is my name?", GREEDY, max_tokens=8))
    again = Chat(demo)
    again.messages = before
    assert answer == "".join(r.text for r in again.ask("What is my name?", GREEDY, max_tokens=8))


def test_the_newer_of_two_concurrent_answers_is_complete(demo: Engine) -> None:
    model = Model(demo, lambda: None)
    expected = [r.token_id for r in model.generate([5, 6, 7], ENDLESS, max_tokens=10)]

    async def run() -> None:
        older = model.generate([8, 9], ENDLESS, max_tokens=50)
        await anext(older)
        reading = asyncio.create_task(anext(older))
        newer = asyncio.create_task(_tokens(model.generate([5, 6, 7], ENDLESS, max_tokens=10)))
        assert await newer == expected
        with suppress(EngineError):  # its piece may have come before the newer answer began
            await reading
        with pytest.raises(EngineError, match="used this model"):
            await _tokens(older)

    for _ in range(5):
        asyncio.run(run())


async def _tokens(pieces: Pieces[Response]) -> list[int | None]:
    return [piece.token_id async for piece in pieces]


def _answers(events: list[Event]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for event in events:
        if event.token_id is not None:
            tokens.setdefault(event.request, []).append(event.token_id)
    return tokens


def test_async_events_equal_sync_events_and_a_cancelled_reader_loses_none(synthetic: Synthetic) -> None:
    rng = random.Random(5)
    prompts = [random_prompt(rng, rng.randrange(5, 60)) for _ in range(5)]
    options = replace(EXACT, context=400, batch=16, sequences=3, outputs=3)
    with Engine(synthetic("llama", "f32"), options) as engine, Model(engine, lambda: None) as model:
        with model.stream() as requests:
            for prompt in prompts:
                requests.add(prompt, GREEDY, max_tokens=10)
            expected = list(requests)

        async def read_in_parts() -> list[Event]:
            events: list[Event] = []
            with model.stream() as requests:

                async def read() -> None:
                    async for event in requests:
                        events.append(event)

                for prompt in prompts:
                    requests.add(prompt, GREEDY, max_tokens=10)
                for n_turns in (0, 1, 2, 5, 9, 30):
                    task = asyncio.create_task(read())
                    for _ in range(n_turns):
                        await asyncio.sleep(0.001)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                await read()
                assert requests._scheduler.busy is False
            return events

        assert asyncio.run(read_in_parts()) == expected


def test_requests_are_added_and_cancelled_while_a_step_runs(synthetic: Synthetic) -> None:
    options = replace(EXACT, context=400, batch=16, sequences=3, outputs=3)
    with Engine(synthetic("llama", "f32"), options) as engine, Model(engine, lambda: None) as model:
        alone = {}
        for n in range(4):
            alone[n] = [r.token_id for r in model.generate([5 + n, 6, 7], ENDLESS, max_tokens=10)][:10]

        async def run() -> tuple[dict[int, int], list[Event]]:
            with model.stream() as requests:
                numbers, events = {requests.add([5, 6, 7], ENDLESS, max_tokens=10): 0}, []
                endless = requests.add([1, 2], ENDLESS, max_tokens=300)

                async def change() -> None:
                    for n in range(1, 4):
                        await asyncio.sleep(0.002)
                        numbers[requests.add([5 + n, 6, 7], ENDLESS, max_tokens=10)] = n
                    requests.cancel(endless)

                changing = asyncio.create_task(change())
                async for event in requests:
                    events.append(event)
                await changing
                events += list(requests)
            return numbers, [event for event in events if event.request != endless]

        numbers, events = asyncio.run(run())
        assert {numbers[number]: tokens for number, tokens in _answers(events).items()} == alone
