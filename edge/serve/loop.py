"""Serving loop of an engine process: its engine thread, and the requests of other threads to it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from edge.deployment.deployed import DeployedModel
from edge.errors import ContextFull, EngineError, SamplingError
from edge.llm.interface import Drafter, TextEngine
from edge.llm.requests import Event, Request, Running
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.serve.embedder import MOST_TOKENS, Embedder
from edge.serve.messages import error_json, logprob_json
from edge.serve.status import EngineStatus
from edge.serve.texts import Tokenizer
from edge.templates.process import TemplateProcess
from edge.templates.template import ChatTemplate
from partition.model.generation import generates

_RATE_S = 5.0  # window of the tokens per second
_JOB_S = 600.0  # for the engine thread to do a job: a step of a large model may take a minute


class ServingLoop:
    """Runs requests until it is ended. `run` is the engine thread; the other methods are for all threads."""

    def __init__(
        self,
        engine: TextEngine,
        deployed: DeployedModel | None,
        send: Callable[..., None],
        drafter: Drafter | None = None,
        *,
        reproducible: bool = False,
    ) -> None:
        """send: sends messages to the server. drafter: drafts tokens. reproducible: a request shares nothing with
        requests before it, and without a seed of its own its seed is its number among the answers to one prompt."""
        self._engine, self._deployed, self._send, self._drafter = engine, deployed, send, drafter
        self._reproducible = reproducible
        self._scheduler = self._new_scheduler()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers: dict[int, int] = {}  # the scheduler's number of a request to the server's
        self._requests: dict[int, Running] = {}  # by the server's number
        self._preparing: dict[int, threading.Event] = {}  # for requests that have not begun: set if cancelled
        self._renderer_lock, self._renderer = threading.Lock(), TemplateProcess()
        special = {name: self._special(name) for name in ("bos", "eos")}
        self._bos = special["bos"]
        self._template = ChatTemplate.for_model(engine.file.metadata, special["bos"], special["eos"], self._renderer)
        self._about = EngineStatus(engine, deployed, self._template.source)
        self._longest = min(engine.context, engine.shape.context_length or engine.context)  # tokens of one request
        self._tokenizer = Tokenizer(engine.model, engine.file)
        self._embedder: Embedder | None = None
        self._said_problem = False  # whether it has reported once why prompts are not cached
        self._began: float | None = None  # when the engine thread began its current job or step
        self._times: deque[float] = deque()  # times of the tokens of the last seconds
        self._counters = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "steps": 0, "preemptions": 0}

    # --- the engine thread ---

    def run(self) -> None:
        """Do jobs, make steps and send results, until the end. Raises the error after which the engine cannot go on."""
        try:
            while True:
                if not self._take_jobs():
                    return
                if self._scheduler.busy:
                    self._step()
        finally:
            self._scheduler.close()
            self._renderer.close()
            if self._embedder is not None:
                self._embedder.close()

    def _take_jobs(self) -> bool:
        """Do the jobs of other threads; wait for one if there is nothing else to do. Return False at the end."""
        while True:
            try:
                job = self._jobs.get(block=not self._scheduler.busy)
            except queue.Empty:
                return True
            if job is None:
                return False
            with self._timed():
                job()

    def _step(self) -> None:
        scheduler, counters = self._scheduler, self._counters
        passes, preemptions = scheduler.passes, scheduler.preemptions
        try:
            with self._timed():
                events = scheduler.step()
        except Exception as error:
            self._fail(error)
            return
        counters["steps"] += scheduler.passes - passes
        counters["preemptions"] += scheduler.preemptions - preemptions
        if events:  # a part of a prompt has none, and the server need not wake for it
            self._send(*map(self._message, events))
        if not self._said_problem and (problem := self._engine.states.problem) is not None:
            self._said_problem = True
            self._send({"say": problem})

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _fail(self, error: Exception) -> None:
        """End all requests with this error. Raise it if the engine cannot be used any more: the process then ends, and
        the next one gets the requests."""
        self._scheduler.close()
        if self._engine.failed is not None:
            raise error
        self._send(*({"id": number, "error": error_json(error)} for number in self._requests))
        self._numbers.clear()
        self._requests.clear()
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._engine, keep=not self._reproducible, drafter=self._drafter, admitted=self._admitted)

    def _admitted(self, number: int) -> None:
        """Report that a request is computed: if this process ends now, the request may be the cause."""
        self._send({"id": self._numbers[number], "begun": True})

    def _message(self, event: Event) -> dict[str, Any]:
        """Return an event as a message to the server."""
        number = self._numbers[event.request]
        if event.token_id is not None:
            self._counters["generated_tokens"] += 1
            self._times.append(time.monotonic())
        if event.finish_reason is not None:
            running = self._requests.pop(number)
            del self._numbers[event.request]
            self._counters["prompt_tokens"] += len(running.request.prompt)
            self._counters["cached_tokens"] += event.cached_tokens
        if event.error is not None:
            return {"id": number, "error": error_json(event.error)}
        piece: dict[str, Any] = {
            "text": event.text,
            "token_id": event.token_id,
            "finish_reason": event.finish_reason,
            "stop_string": event.stop_string,
        }
        if event.logprobs is not None and event.token_id is not None:
            piece["logprob"] = self._logprob(event.token_id, event.logprobs.chosen)
            piece["alternatives"] = [self._logprob(*token) for token in event.logprobs.alternatives]
        return {"id": number, "piece": piece, "cached_tokens": event.cached_tokens}

    def _logprob(self, token: int, logprob: float) -> list[Any]:
        return logprob_json(token, self._engine.model.piece(token, special=True), logprob)

    # --- all threads ---

    def beat(self) -> dict[str, Any]:
        """Return for how long the engine thread has been at one step; None: it waits for requests."""
        began = self._began
        return {"busy_s": None if began is None else time.monotonic() - began}

    def end(self) -> None:
        """Let `run` return, and drop the current computation."""
        self._engine.stop()
        self._jobs.put(None)

    def expect(self, number: int) -> None:
        """Register a request that will be prepared: from now on it can be cancelled."""
        self._preparing[number] = threading.Event()

    def cancel(self, number: int) -> None:
        """End a request within a step."""

        def job() -> None:
            running = self._requests.get(number)
            if running is not None:
                self._scheduler.cancel(running.number)

        if (preparing := self._preparing.get(number)) is not None:
            preparing.set()  # at once: a constraint may be compiling
        self._jobs.put(job)

    def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a request of the server by name, as JSON values. Raises its errors."""
        return getattr(self, f"_ask_{what}")(**arguments)

    def status(self) -> dict[str, Any]:
        """Return the status, as ServedModel.status; for the engine thread."""
        now, counters = time.monotonic(), dict(self._counters)
        while self._times and self._times[0] < now - _RATE_S:
            self._times.popleft()
        slots = [
            {
                "id": running.slot.sequence if running.slot else -1,
                "is_processing": True,
                "prompt_tokens": len(running.request.prompt),
                "generated_tokens": len(running.continuation.tokens),
            }
            for running in sorted(self._scheduler.running, key=lambda one: one.slot.sequence if one.slot else -1)
        ]
        return {
            **self._about.to_json(),
            "slots": slots,
            "waiting": len(self._scheduler.waiting),
            "tokens_per_s": len(self._times) / _RATE_S,
            "counters": counters,
            "speculation": None if self._drafter is None else self._drafter.to_json(),
        }

    def generate(self, number: int, **generation: Any) -> None:
        """Prepare a request and queue it. Raises all errors that a request can have."""
        try:
            given_up = self._preparing[number].is_set
            if given_up():
                raise EngineError("the request was cancelled before it was prepared")
            running = self._scheduler.prepare(self._request(generation), given_up)
        except BaseException:
            self._preparing.pop(number, None)
            raise
        self._jobs.put(lambda: self._begin(number, running))

    def _request(self, generation: Mapping[str, Any]) -> Request:
        """Return the scheduler's request."""
        if not generates(self._engine.file):
            raise SamplingError(f"{self._engine.path.name} does not go on with texts; ask it for embeddings")
        prompt = self._prompt(generation)
        room = self._longest - len(prompt)
        if room <= 0:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens, and {self._longest} is all that it and its answer may have;"
                " use a shorter prompt, or serve with a larger --context where the model was trained for more"
            )
        max_tokens = generation["max_tokens"]
        if max_tokens is not None and max_tokens < 1:
            raise SamplingError(f"max_tokens is {max_tokens}: an answer has 1 token or more")
        biases = {int(token): bias for token, bias in generation["sampling"].get("logit_bias", {}).items()}
        stops = () if generation["messages"] is None else self._template.stops
        seed = {"seed": generation["place"]} if self._reproducible else {}
        return Request(
            prompt,
            min(room, max_tokens or room),
            SamplingParams(**{**seed, **generation["sampling"], "logit_bias": biases}),
            stops,
            logprobs=generation["logprobs"],
            generated=generation["generated"],
            namespace=generation["namespace"],
        )

    def _begin(self, number: int, running: Running) -> None:
        self._send({"id": number, "result": {"prompt_tokens": len(running.request.prompt)}})
        if self._preparing.pop(number).is_set():
            running.continuation.close()
            piece = {"text": "", "finish_reason": "cancelled"}
            self._send({"id": number, "piece": piece, "cached_tokens": 0})
            return
        self._requests[number] = running
        self._numbers[running.number] = number
        self._scheduler.enqueue(running)

    def _prompt(self, generation: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the prompt."""
        prompt, messages = generation["prompt"], generation["messages"]
        if messages is not None:
            self._tokenizer.check_messages(messages, self._longest)
            text = self._rendered(messages, generation["tools"], generation["variables"])
            starts_with_bos = bool(self._bos) and text.startswith(self._bos)
            return self._tokenizer.tokenize(text, self._longest, add_special=not starts_with_bos, parse_special=True)
        tokens = self._tokens(prompt, self._longest)
        if not tokens:
            raise ContextFull("the prompt is empty: there is nothing to continue")
        return tokens

    def _tokens(self, text: str | Sequence[int], most: int) -> list[int]:
        """Return the token ids of a text, or given ids after a check. SamplingError for an invalid id, ContextFull for
        a text that is far too long."""
        if isinstance(text, str):
            return self._tokenizer.tokenize(text, most)
        return self._checked(text)

    def _checked(self, text: Sequence[int]) -> list[int]:
        n_vocab = self._engine.model.n_vocab
        if bad := [token for token in text if not 0 <= token < n_vocab]:
            raise SamplingError(f"{bad[0]} is no token: ids are from 0 to {n_vocab - 1}")
        return list(text)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        with self._renderer_lock:
            return self._template.render(messages, tools=tools, variables=variables)

    def _ask_tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._engine.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def _ask_pieces(self, tokens: list[int]) -> list[str]:
        return [self._engine.model.piece(token, special=True).decode("latin-1") for token in self._checked(tokens)]

    def _ask_render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: dict[str, Any]
    ) -> str:
        return self._rendered(messages, tools, variables)

    def _ask_status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._on_engine_thread(self.status)
        return status

    def _ask_embed(self, texts: list[str | list[int]]) -> dict[str, Any]:
        if self._deployed is not None:
            raise EngineError("this model runs on several devices, and embeddings need one; serve it without --workers")
        if self._engine.paging is not None:
            raise EngineError("this model runs within a memory budget, and embeddings need a context of their own")
        tokenized = [self._tokens(text, MOST_TOKENS) for text in texts]
        vectors = self._on_engine_thread(lambda: [self._embed(tokens) for tokens in tokenized])
        return {"embeddings": vectors, "tokens": sum(map(len, tokenized))}

    def _embed(self, tokens: list[int]) -> list[float]:
        if self._embedder is None:
            trained = self._engine.shape.context_length or self._engine.context
            self._embedder = Embedder(self._engine.model, trained, self._engine.threads)
        return [float(value) for value in self._embedder.embed(tokens)]

    def _on_engine_thread(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, done by the engine thread between two steps."""
        done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def job() -> None:
            try:
                done.put((work(), None))
            except Exception as error:
                done.put((None, error))

        self._jobs.put(job)
        with suppress(queue.Empty):
            result, error = done.get(timeout=_JOB_S)
            if error is not None:
                raise error
            return result
        raise EngineError(f"the engine has been busy for {_JOB_S:g} s")

    def _special(self, name: str) -> str:
        token = self._engine.model.special_token(name)
        return "" if token is None else self._engine.model.piece(token, special=True).decode(errors="replace")
