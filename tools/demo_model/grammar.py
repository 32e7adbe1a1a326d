"""Dialogues about devices, units, sums and small talk: training material, and questions kept out of it.

The model is trained on `dialogues` and examined on `held_out`. Each thing that can be asked has a name, and a hash of
that name decides on which side it falls: a held-out sum, for example, never occurs in training in any phrasing. One
`random.Random` decides everything else, so the same seed gives the same dialogues on every machine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from tools.demo_model import talk, topics
from tools.demo_model.topics import Topic, Turn

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}, as chat templates take it

CATEGORIES = ("sums", "units", "devices", "comparisons", "small talk", "recall", "markdown")

PLAIN, BRIEF = "You are a helpful assistant.", "Answer briefly."

# How often each topic is drawn for training: sums and comparisons are the hardest to learn. Recall is woven in.
TOPICS: dict[str, tuple[Topic, int]] = {
    "sums": (topics.sums, 34),
    "units": (topics.units, 10),
    "devices": (topics.devices, 12),
    "comparisons": (topics.comparisons, 26),
    "small talk": (talk.small_talk, 10),
    "markdown": (talk.markdown, 8),
}


def is_held_out(request: str) -> bool:
    """Return whether the thing asked is kept out of training: one in ten, by a stable hash; never the empty string."""
    return bool(request) and hashlib.sha256(request.encode()).digest()[0] < 26


def dialogues(rng: random.Random) -> Iterator[list[Message]]:
    """Training dialogues without end; none contains a held-out question.

    Most have one to five questions. A few are much longer, so that a chat may go on.
    """
    while True:
        size = rng.randint(1, 5) if rng.random() < 0.97 else rng.randint(6, 20)
        kinds = rng.sample(tuple(talk.RECALLS), rng.choice((0, 1, 1, 1, 2)))
        yield _messages(_system(rng), _context(rng, size, kinds))


def statements(rng: random.Random) -> Iterator[str]:
    """Answers that can be checked without their question, without end: practice in fewer tokens than dialogues."""
    while True:
        topic = rng.choices((topics.sums, topics.comparisons, talk.memories), (50, 30, 20))[0]
        yield _draw(rng, topic, held_out_question=False)[-1].answer


def held_out(n: int, seed: int, category: str | None = None) -> list[tuple[list[Message], str]]:
    """`n` pairs of messages, ending with a question never trained on, and the one right answer to it.

    The categories take turns, in the order of `CATEGORIES`, unless one is named. Up to three trained-on turns may
    precede the question.
    """
    rng = random.Random(seed)
    return [_examination(rng, category or CATEGORIES[i % len(CATEGORIES)]) for i in range(n)]


def _examination(rng: random.Random, category: str) -> tuple[list[Message], str]:
    """One held-out question of a category within a dialogue, and its answer."""
    kind = rng.choice(tuple(talk.RECALLS))
    topic = talk.RECALLS[kind] if category == "recall" else TOPICS[category][0]
    *statements, question = _draw(rng, topic, held_out_question=True)
    others = [other for other in talk.RECALLS if other != kind]
    turns = _context(rng, rng.choice((0, 0, 1, 2)), rng.sample(others, rng.choice((0, 0, 0, 1))))
    _weave(rng, turns, statements)
    messages = _messages(_system(rng), [*turns, question])
    return messages[:-1], messages[-1]["content"]


def _context(rng: random.Random, size: int, kinds: list[str]) -> list[Turn]:
    """`size` trained-on questions in random order, with the given kinds of recall woven in."""
    names, weights = list(TOPICS), [weight for _, weight in TOPICS.values()]
    turns = [
        turn
        for name in rng.choices(names, weights, k=size)
        for turn in _draw(rng, TOPICS[name][0], held_out_question=False)
    ]
    for kind in kinds:
        _weave(rng, turns, _draw(rng, talk.RECALLS[kind], held_out_question=False))
    return turns


def _draw(rng: random.Random, topic: Topic, held_out_question: bool) -> list[Turn]:
    """Draw from the topic again until its question is on the wanted side of the split."""
    while is_held_out((turns := topic(rng))[-1].subject) != held_out_question:
        pass
    return turns


def _weave(rng: random.Random, turns: list[Turn], more: list[Turn]) -> None:
    """Insert `more` into `turns` at random places, keeping its order."""
    places = sorted(rng.randint(0, len(turns)) for _ in more)
    for i, (place, turn) in enumerate(zip(places, more, strict=True)):
        turns.insert(place + i, turn)


def _system(rng: random.Random) -> str:
    """A system prompt, or the empty string for none."""
    return rng.choices(("", PLAIN, BRIEF), (50, 35, 15))[0]


def _messages(system: str, turns: list[Turn]) -> list[Message]:
    """The turns as messages, answered as the system prompt asks."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        answer = turn.brief if system == BRIEF else turn.answer
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": answer}]
    return messages
