"""Serving loop of an engine process: the engine thread, and the calls of other threads to it."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from edge.api.config import EngineConfig
from edge.deployment.deployed import DeployedModel
from edge.errors import ContextFull, EngineError, ReplicaLost, SamplingError
from edge.llama.llama import Model
from edge.llm.interface import Drafter, TextEngine
from edge.llm.requests import Event, RequestState
from edge.llm.scheduler import Scheduler
from edge.llm.step_budget import LatencyTargets
from edge.media.encoder import MediaEncoder
from edge.serve.engine.arrivals import Arrivals
from edge.serve.engine.embedder import MOST_TOKENS, Embedder
from edge.serve.engine.inputs import InputProcessor
from edge.serve.engine.jobs import EngineJobs
from edge.serve.engine.status import EngineStatus, Statistics
from edge.serve.messages import error_json, logprob_json
from edge.serve.warming.allowance import Allowance
from edge.serve.warming.requests import WarmingRequests
from edge.text.constraints.constraint import never_given_up

T = TypeVar("T")
GivenUp = Callable[[], bool]  # returns True if the client has disconnected


class ServingLoop:
    """Runs requests until it is ended. `run` is the engine thread; the other methods are for all threads."""

    def __init__(
        self,
        config: EngineConfig,
        engine: TextEngine,
        deployed: DeployedModel | None,
        send: Callable[..., None],
        drafter: Drafter | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        """config: configuration of the loaded engine.
        send: sends messages to the server.
        drafter: drafts tokens.

        encoder: encoder of pictures and sounds.
        """
        self._engine, self._deployed, self._send, self._drafter = engine, deployed, send, drafter
        self.has_ended = False  # True once `run` ends, which closes what requests use
        self._targets = latency_targets(config)
        self._new_scheduler = partial(
            Scheduler,
            engine,
            keep=not config.reproducible,
            drafter=drafter,
            admitted=self._admitted,
            targets=self._targets,
        )
        self._scheduler = self._new_scheduler()
        self._jobs = EngineJobs()
        self._requests: dict[int, RequestState] = {}  # by the server's request number, which the scheduler uses, too
        self._arrivals = Arrivals(engine, lambda: self._jobs.put(lambda: None))
        self._inputs = InputProcessor(config, engine, encoder)
        takes_media = encoder is not None
        self._about = EngineStatus(engine, deployed, self._inputs.template.source, takes_media=takes_media)
        self._embedder = Embedder(engine.model, engine.shape.context_length or engine.context, engine.threads)
        self._statistics = Statistics()
        allowance = Allowance(config.prefix_warming)
        self._warming = WarmingRequests(self._inputs, lambda: self._scheduler, self._jobs.put, allowance)
        self._handlers: dict[str, Callable[..., Any]] = {
            "tokenize": engine.model.tokenize,
            "pieces": self._inputs.pieces,
            "render": self._inputs.render,
            "embed": self._embed,
            "rerank": self._rerank,
            "status": lambda: self._jobs.result(self.status),
            "turn": self._warming.warmer.turn,
            "announce": self._warming.warmer.announce,
            "announced": self._warming.warmer.announced,
            "forget": self._warming.warmer.forget,
        }

    # --- the engine thread ---

    def run(self) -> None:
        """Run jobs and steps and send results, until the end. Raises an error after which the engine is unusable."""
        threading.Thread(target=self._warming.warmer.run, name="prefix warming", daemon=True).start()
        try:
            while self._jobs.take(lambda: self._scheduler.busy and not self._arrivals.waits_for(self._scheduler)):
                self._step()
        finally:
            self.has_ended = True
            self._warming.warmer.close()
            self._scheduler.close()
            self._inputs.close()
            self._embedder.close()

    def _step(self) -> None:
        scheduler, counters = self._scheduler, self._statistics.counters
        passes, preemptions = scheduler.passes, dict(scheduler.queues.preemptions)
        began, events = time.monotonic(), list[Event]()
        try:
            with self._jobs.timed(), self._arrivals.interruptible(scheduler, is_alone=self._deployed is None):
                events = scheduler.step()
        except Exception as error:
            self._fail(error)
            return
        counters["steps"] += scheduler.passes - passes
        for ground, counter in (("foreground", "preemptions"), ("background", "background_preemptions")):
            counters[counter] += scheduler.queues.preemptions[ground] - preemptions[ground]
        self._about.computed_s += time.monotonic() - began
        self._warming.stepped(events, time.monotonic() - began)
        events = [event for event in events if event.request in self._requests]
        if events:  # a prompt chunk has no events, and the server need not wake up for it
            self._send(*map(self._message, events))
        for line in (*self._about.news(), *self._about.recovery_news(len(self._requests))):
            self._send({"say": line})

    def _fail(self, error: Exception) -> None:
        """End all requests with this error.

        Raise the error if the engine is unusable. The process then ends, and the next process gets the requests.
        """
        self.has_ended = self._engine.failed is not None or isinstance(error, ReplicaLost)
        self._scheduler.close()
        if self.has_ended:
            raise error
        self._send(*({"id": number, "error": error_json(error)} for number in self._requests))
        self._warming.lost()
        self._requests.clear()
        self._scheduler = self._new_scheduler()

    def _admitted(self, number: int) -> None:
        """Report that a request has begun. If this process crashes now, the request may be the cause."""
        if number in self._requests:
            self._send({"id": number, "begun": True})

    def _message(self, event: Event) -> dict[str, Any]:
        """Return an event as a message to the server."""
        number, counters = event.request, self._statistics.counters
        if event.token_id is not None:
            self._statistics.add_token()
        if event.finish_reason is not None:
            state = self._requests.pop(number)
            if event.stop_string not in state.request.sampling.stop:  # a stop string of the template
                event.stop_string = None
            counters["prompt_tokens"] += len(state.request.prompt)
            counters["cached_tokens"] += event.cached_tokens
            self._warming.warmer.count(state)
        if event.error is not None:
            return {"id": number, "error": error_json(event.error)}
        piece: dict[str, Any] = {
            "text": event.text,
            "token_id": event.token_id,
            "finish_reason": event.finish_reason,
            "stop_string": event.stop_string,
        }
        if event.thought_tokens:
            piece |= {"thought": event.thought, "thought_tokens": event.thought_tokens}
        if event.logprobs is not None and event.token_id is not None:
            model = self._engine.model
            piece["logprob"] = _logprob(model, event.token_id, event.logprobs.chosen)
            piece["alternatives"] = [_logprob(model, *token) for token in event.logprobs.alternatives]
        return {"id": number, "piece": piece, "cached_tokens": event.cached_tokens}

    def status(self) -> dict[str, Any]:
        """Return the status, see ServedModel.status."""
        slots = [
            {
                "id": state.sequence,
                "is_processing": True,
                "prompt_tokens": len(state.request.prompt),
                "generated_tokens": len(state.continuation.tokens),
            }
            for state in sorted(self._scheduler.queues.running, key=lambda request: request.sequence)
            if state.number in self._requests
        ]
        return {
            **self._about.to_json(),
            "slots": slots,
            "waiting": sum(state.number in self._requests for state in self._scheduler.queues.waiting),
            **self._statistics.to_json(),
            "speculation": None if self._drafter is None else self._drafter.to_json(),
            "latency": None if self._targets is None else self._targets.to_json(),
            "warming": dict(self._warming.warmer.counters),
        }

    def _begin(self, number: int, state: RequestState) -> None:
        self._send({"id": number, "result": {"prompt_tokens": len(state.request.prompt)}})
        if self._arrivals.prepared(number):
            state.continuation.close()
            piece = {"text": "", "finish_reason": "cancelled"}
            self._send({"id": number, "piece": piece, "cached_tokens": 0})
            return
        self._requests[number] = state
        self._scheduler.enqueue(state)

    # --- all threads ---

    def heartbeat(self) -> dict[str, Any]:
        """Return the duration of the engine thread's current step in seconds, or None if it is idle."""
        return {"busy_s": self._jobs.busy_s}

    def end(self) -> None:
        """Make `run` return, and abort the current computation."""
        self._engine.stop()
        self._jobs.put(None)

    def expect(self, number: int) -> None:
        """Register a request that will be prepared.

        It can be cancelled from now on, and prefix warming waits for it.
        """
        self._arrivals.expect(number)

    def cancel(self, number: int) -> None:
        """End a request within a step."""
        self._arrivals.cancel(number)  # immediately, because its constraint may be compiling
        self._jobs.put(lambda: self._scheduler.cancel(number))

    def generate(self, number: int, **generation: Any) -> None:
        """Prepare a request and queue it. Raises all errors that a request can have."""
        try:
            given_up = partial(self._arrivals.is_cancelled, number)
            if given_up():
                raise EngineError("the request was cancelled before it was prepared")
            state = self._scheduler.prepare(self._inputs.request(generation, given_up), given_up, number)
        except BaseException:
            self._arrivals.prepared(number)
            raise
        self._jobs.put(lambda: self._begin(number, state))

    def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a named request of the server, as JSON values. Raises its errors."""
        return self._handlers[what](**arguments)

    def pool(self, number: int, what: str, arguments: Mapping[str, Any]) -> Any:
        """Answer an expected request to embed or score texts, like `ask`. Raises EngineError if it is cancelled."""
        try:
            return self._handlers[what](**arguments, given_up=partial(self._arrivals.is_cancelled, number))
        finally:
            self._arrivals.prepared(number)

    def _embed(self, texts: Sequence[str | Sequence[int]], given_up: GivenUp = never_given_up) -> dict[str, Any]:
        tokenized = []
        for number, text in enumerate(texts):
            try:
                tokens = self._inputs.tokens(text, MOST_TOKENS)
                self._embedder.check(tokens)
            except (ContextFull, SamplingError) as error:
                raise type(error)(f"input.{number}: {error}" if len(texts) > 1 else str(error)) from None
            tokenized.append(tokens)
        # Vectors are sent in base64, because thousands of them as decimal text would be too much for a message.
        embed = self._embedder.embed
        vectors = self._pooled(lambda tokens: b64encode(embed(tokens).tobytes()).decode(), tokenized, given_up)
        return {"embeddings": vectors, "tokens": sum(map(len, tokenized))}

    def _rerank(self, query: str, documents: Sequence[str], given_up: GivenUp = never_given_up) -> dict[str, Any]:
        tokenized = self._inputs.ranked(query, documents, self._embedder.most_tokens)
        scores = self._pooled(self._embedder.score, tokenized, given_up)
        return {"scores": scores, "tokens": sum(map(len, tokenized))}

    def _pooled(self, work: Callable[[Sequence[int]], T], texts: Sequence[Sequence[int]], given_up: GivenUp) -> list[T]:
        """Return the engine thread's result for each text. Other requests may run between two texts."""
        if self._deployed is not None:
            raise EngineError(
                "this model runs on several devices, but embedding and reranking need one; serve it without --workers"
            )
        if self._engine.paging is not None:
            raise EngineError(
                "this model runs within a memory budget, but embedding and reranking need more; serve it without"
                " --memory"
            )
        results = []
        for tokens in texts:
            if given_up():
                raise EngineError("the request was cancelled before all of its texts were computed")
            results.append(self._jobs.result(partial(work, tokens)))
        return results


def _logprob(model: Model, token: int, logprob: float) -> list[Any]:
    return logprob_json(token, model.piece(token, special=True), logprob)


def latency_targets(config: EngineConfig) -> LatencyTargets | None:
    """Return the latency targets of the server's steps, or None if there are none."""
    itl, ttft = (None if ms is None else ms / 1000 for ms in (config.target_itl_ms, config.target_ttft_ms))
    return None if itl is None and ttft is None else LatencyTargets(itl, ttft)
