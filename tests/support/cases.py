"""Prompts whose greedy answers do not depend on the order of sums; requests for them that start and end at any time."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.scheduler import Scheduler

_MOST_TRIES = 1000
Cases = list[tuple[list[int], list[int]]]  # prompts, and their greedy answers on one device

CLEAR = 1e-2  # by how many deviations each best logit leads: sums in another order, and other portions, change less


def random_tokens(rng: random.Random, n: int) -> list[int]:
    """Return `n` tokens of a small model, none of which ends an answer."""
    return [rng.randrange(3, 512) for _ in range(n)]


def greedy(whole: Engine, prompt: Sequence[int], n: int) -> tuple[list[int], float]:
    """The answer, and by how many deviations each token was ahead of the next best at least."""
    whole.kv_clear()
    for start in range(0, len(prompt), whole.batch):
        logits = whole.decode(prompt[start : start + whole.batch], start)
    answer, lead = [], float("inf")
    for i in range(n):
        second, best = np.sort(logits)[-2:]
        lead = min(lead, float((best - second) / logits.std()))
        answer.append(int(logits.argmax()))
        logits = whole.decode(answer[-1:], len(prompt) + i)
    return answer, lead


def clear_case(
    whole: Engine, make_prompt: Callable[[], list[int]], n: int, least: float = CLEAR
) -> tuple[list[int], list[int]]:
    """The first prompt that `make_prompt` makes whose `n` tokens all lead by more than `least`, and these."""
    for _ in range(_MOST_TRIES):
        prompt = make_prompt()
        answer, lead = greedy(whole, prompt, n)
        if lead > least:
            return prompt, answer
    raise AssertionError(f"none of {_MOST_TRIES} prompts has {n} tokens that lead by more than {least}")


def come_and_go(
    scheduler: Scheduler, cases: Cases, request: Callable[[list[int]], Request], rng: random.Random, cancelled: float
) -> None:
    """Ask for all cases twice, at random moments. Each request is answered as it should be, or cancelled: with the
    probability `cancelled` one of them is in a step."""
    waiting, replies = [*cases, *cases], dict[int, tuple[list[int], list[int], list[str]]]()
    rng.shuffle(waiting)
    while waiting or scheduler.busy:
        if waiting and rng.random() < 0.2:
            prompt, answer = waiting.pop()
            replies[scheduler.add(request(prompt))] = answer, [], []
        if replies and rng.random() < cancelled:
            scheduler.cancel(rng.choice(list(replies)))
        for event in scheduler.step():
            answer, tokens, ends = replies[event.request]
            assert not ends
            tokens += [event.token_id] if event.token_id is not None else []
            ends += [event.finish_reason] if event.finish_reason is not None else []
    for answer, tokens, ends in replies.values():
        assert tokens == (answer if ends == ["length"] else answer[: len(tokens)])
        assert ends in (["length"], ["cancelled"])
