"""Topics of the demonstration: sums, units, devices and comparisons; what is asked, in which words, and the answer.

A topic is a function of a `random.Random`. It returns either one question, or something the user tells and then a
question about it. `Turn.subject` names what is asked; `grammar.py` uses it to keep some questions out of training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import facts
from tools.demo_model.facts import Device


@dataclass(frozen=True)
class Turn:
    """One question and its answers. `subject` names what is asked; the empty string is never held out."""

    subject: str
    question: str
    answer: str
    brief: str


Topic = Callable[[random.Random], list[Turn]]  # one question, or something told and then a question about it


def vary(rng: random.Random, text: str) -> str:
    """The text as one of many people might type it: lower case, no final mark, a "please", a greeting before it."""
    style = rng.random()
    if style < 0.5:
        return text
    if style < 0.6:
        return text.lower()
    if style < 0.7:
        return text[0].lower() + text[1:].rstrip("?.")
    if style < 0.8:
        return text.rstrip("?.")
    if style < 0.9:
        return rng.choice(("Hi, ", "hi, ", "Hello, ", "And ", "Please, ")) + text[0].lower() + text[1:]
    return text.rstrip("?.") + rng.choice((", please", " please", ", please?", ", thanks"))


def ask(rng: random.Random, request: str, question: str, answer: str, brief: str = "") -> list[Turn]:
    """A single question, its wording varied; without `brief` the short answer is the full one."""
    return [Turn(request, vary(rng, question), answer, brief or answer)]


# Sums. The pair of operands is what is held out, in either order and for both plus and minus.

PLUS = (
    "What is {a} plus {b}?", "How much is {a} plus {b}?", "{a} plus {b}?", "What is {a} + {b}?", "{a} + {b}?",
    "{a}+{b}", "Add {a} and {b}.", "What is the sum of {a} and {b}?", "Can you add {a} and {b}?",
)  # fmt: skip
MINUS = (
    "What is {a} minus {b}?", "How much is {a} minus {b}?", "{a} minus {b}?", "What is {a} - {b}?", "{a} - {b}?",
    "{a}-{b}", "Take {b} from {a}.", "Subtract {b} from {a}.", "Can you take {b} from {a}?",
)  # fmt: skip


def sum_key(a: int, b: int) -> str:
    """The name under which a pair of operands is held out."""
    return f"sum {min(a, b)} {max(a, b)}"


def sums(rng: random.Random) -> list[Turn]:
    """A sum or a difference of two numbers from 0 to 99."""
    a, b = rng.randrange(100), rng.randrange(100)
    if rng.random() < 0.5:
        phrase, word, result = rng.choice(PLUS), "plus", a + b
    else:
        a, b = max(a, b), min(a, b)
        phrase, word, result = rng.choice(MINUS), "minus", a - b
    return ask(rng, sum_key(a, b), phrase.format(a=a, b=b), f"{a} {word} {b} is {result}.", str(result))


# Units. A fact is held out in one phrasing and trained in the others.

CONVERT = (
    "How many {small} are in {n} {big}?", "How many {small} are there in {n} {big}?", "What is {n} {big} in {small}?",
    "Convert {n} {big} to {small}.", "{n} {big} in {small}?", "How many {small} make {n} {big}?",
)  # fmt: skip


def units(rng: random.Random) -> list[Turn]:
    """A conversion from a large unit to the next smaller one."""
    first, many, small, factor, limit = rng.choice(facts.UNITS)
    n, phrase = rng.randint(1, limit), rng.choice(CONVERT)
    question = phrase.format(small=small, n=n, big=first if n == 1 else many)
    value = f"{n * factor} {small}"
    return ask(rng, question, question, f"{n} {first} is {value}." if n == 1 else f"{n} {many} are {value}.", value)


# Device facts. Again one phrasing of a fact is held out, never the fact.

ABOUT = {
    "cores": ("How many cores does the {d} have?", "How many cores are in the {d}?", "{d} cores?",
              "What is the number of cores of the {d}?"),
    "processor": ("What processor does the {d} have?", "Which processor is in the {d}?", "{d} processor?",
                  "What is the architecture of the {d}?"),
    "memory": ("How much memory does the {d} have?", "How much RAM is in the {d}?", "{d} memory?",
               "What is the memory of the {d}?"),
    "year": ("When did the {d} come out?", "What year is the {d} from?", "{d} year?", "How old is the {d}?"),
    "kind": ("What is the {d}?", "What kind of device is the {d}?", "{d}?", "What is a {d}?"),
    "join": ("Can the {d} join?", "Can a {d} run a worker?", "Can I use my {d} as a worker?",
             "Does the {d} work with edge?"),
}  # fmt: skip


def up_to(device: Device) -> str:
    """The memory of a device in words."""
    return f"up to {device.memory}" if device.variants else device.memory


def an(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in '8AEIOaeio' else 'a'} {noun}"


def facts_of(device: Device) -> dict[str, tuple[str, str]]:
    """Return what is known about a device: for each attribute the full and the brief answer."""
    the, cores = f"The {device.name}", f"{device.cores} core{'s' if device.cores > 1 else ''}"
    joins = (f"Yes, the {device.name} can join.", "Yes")
    stays = (f"No, the {device.name} cannot join: it has {an(device.processor)} processor.", "No")
    return {
        "cores": (f"{the} has {cores}.", cores),
        "processor": (f"{the} has {an(device.processor)} processor.", device.processor),
        "memory": (f"{the} has {up_to(device)} of memory.", device.memory),
        "year": (f"{the} came out in {device.year}.", str(device.year)),
        "kind": (f"{the} is {an(device.kind)}.", device.kind),
        "join": joins if device.joins else stays,
    }


def devices(rng: random.Random) -> list[Turn]:
    """A fact about one device, or whether devices of some kind can join."""
    if rng.random() < 0.1:
        kind = rng.choice(facts.CATEGORIES_THAT_JOIN + facts.CATEGORIES_THAT_DO_NOT)
        phrase = rng.choice(("Can {a} join?", "Can {a} run a worker?", "Can I use {a} as a worker?", "Does {a} work?"))
        yes = kind in facts.CATEGORIES_THAT_JOIN
        answer = f"Yes, {an(kind)} can join." if yes else f"No, {an(kind)} cannot join."
        return ask(rng, f"{kind} {phrase}", phrase.format(a=an(kind)), answer, "Yes" if yes else "No")
    device, attribute = rng.choice(facts.DEVICES), rng.choice(tuple(ABOUT))
    question = rng.choice(ABOUT[attribute]).format(d=device.name)
    return ask(rng, question, question, *facts_of(device)[attribute])


# Comparisons. The pair is what is held out, in either order.


def comparisons(rng: random.Random) -> list[Turn]:
    """Which of two devices has more cores or memory, or is older."""
    a, b = rng.sample(facts.DEVICES, 2)
    attribute = rng.choice(("cores", "memory", "year"))
    first, second = sorted((a.name, b.name))
    if attribute == "year":
        phrase, word, more = "Which is older, the {a} or the {b}?", "is older", b.year - a.year
        said = f"The {a.name} came out in {a.year} and the {b.name} in {b.year}"
    elif attribute == "cores":
        phrase, word, more = "Which has more cores, the {a} or the {b}?", "has more", a.cores - b.cores
        said = f"The {a.name} has {a.cores} and the {b.name} has {b.cores}"
    else:
        phrase, word, more = "Which has more memory, the {a} or the {b}?", "has more", a.kib - b.kib
        said = f"The {a.name} has {up_to(a)} and the {b.name} has {up_to(b)}"
    if rng.random() < 0.3:
        phrase = phrase.replace("the ", "")
    best = f"the {(a if more > 0 else b).name}" if more else "neither"
    question = phrase.format(a=a.name, b=b.name)
    return ask(rng, f"{attribute} {first} {second}", question, f"{said}, so {best} {word}.", best.capitalize()
               if not more else best.removeprefix("the "))  # fmt: skip
