"""Test the exchange with a page in any order of operations, answers, broken connections and losses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge.bridge.exchange import Exchange
from edge.browser.frames import unpack


class Exchanged(RuleBasedStateMachine):
    """Each operation gets one answer or one failure, and the newest stream alone has the frames for the page."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._ends = 0
        self._exchange = Exchange(self._count_end)
        self._stream: AsyncIterator[bytes] | None = None
        self._sent: list[dict[str, Any]] = []  # frames in the newest stream that the page has not read
        self._results: list[str | None] = []  # by number of the operation: its answer or failure
        self._known: list[int] = []  # numbers of operations that the page has read

    def teardown(self) -> None:
        self._exchange.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _count_end(self) -> None:
        self._ends += 1

    def _run(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    def _next(self, stream: AsyncIterator[bytes]) -> dict[str, Any]:
        return unpack(self._run(asyncio.wait_for(anext(stream), 5))[4:])[0]

    def _finish(self, number: int, result: str) -> None:
        assert self._results[number - 1] is None
        self._results[number - 1] = result

    def _add(self, frame: dict[str, Any]) -> None:
        if self._stream is not None:
            self._sent.append(frame)

    @invariant()
    def queue_has_only_unread_frames(self) -> None:
        queue = self._exchange._stream
        assert (0 if queue is None else queue.qsize()) == len(self._sent)

    @property
    def _open(self) -> list[int]:
        return [number for number, result in enumerate(self._results, 1) if result is None]

    @rule()
    def ask(self) -> None:
        number = len(self._results) + 1
        self._results.append(None)

        async def reply(header: dict[str, Any], payload: memoryview) -> None:
            self._finish(number, header["text"])

        self._exchange.ask({"op": "x"}, b"", reply, lambda why: self._finish(number, why))
        self._add({"op": "x", "id": number})

    @rule(text=st.sampled_from(["stop", "resume", "show"]))
    def tell(self, text: str) -> None:
        """A frame without an answer is between the operations before and after it. Without a stream it is lost."""
        self._exchange.tell({"op": text})
        self._add({"op": text})

    @precondition(lambda self: self._sent)
    @rule()
    def read(self) -> None:
        assert self._stream is not None
        frame = self._sent.pop(0)
        assert self._next(self._stream) == frame
        if "id" in frame:
            self._known.append(frame["id"])

    @rule()
    def attach(self) -> None:
        old, self._stream = self._stream, self._exchange.attach()
        self._sent.clear()
        if old is not None:
            assert self._next(old) == {"op": "replaced"}
            assert self._run(anext(old, None)) is None
        assert self._exchange.is_connected

    @precondition(lambda self: self._stream is not None)
    @rule(hides=st.booleans())
    def send_again(self, hides: bool) -> None:
        """The page says hello. hides: it lost the operations that it had read."""
        while self._sent:
            self.read()
        known = [] if hides else self._known
        self._exchange.send_again(known)
        self._sent += [{"op": "x", "id": number} for number in self._open if number not in known]

    @precondition(lambda self: self._results)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, len(self._results)))
        before = self._results[number - 1]
        self._run(self._exchange.on_answer({"id": number, "text": "answer"}, memoryview(b"")))
        assert self._results[number - 1] == (before or "answer")

    @rule()
    def lose(self) -> None:
        expected = [result or "lost" for result in self._results]
        self._exchange.fail("lost")
        assert self._results == expected

    @precondition(lambda self: self._sent)
    @rule()
    def disconnect(self) -> None:
        """The connection ends after the page has read a frame."""
        self.read()
        before = self._ends
        self._run(self._stream.aclose())  # type: ignore[union-attr]
        self._stream = None
        self._sent.clear()
        assert self._ends == before + 1
        assert not self._exchange.is_connected


TestExchanged = Exchanged.TestCase
TestExchanged.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
