"""Talk of the demonstration: small talk, recall of what was said, and answers in Markdown.

Topics as in `tools.demo_model.topics`.
"""

from __future__ import annotations

import random

from tools.demo_model import facts
from tools.demo_model.facts import Device
from tools.demo_model.topics import Topic, Turn, ask, sum_key, up_to

ONLY = "I only know devices, units, small sums and small talk."

# Small talk, and a plain answer to everything else.


def invented(rng: random.Random) -> str:
    """A pronounceable word that nobody has seen, so that names are copied and not looked up."""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    return ("".join(syllables) + rng.choice(("", "n", "r", "l", "s", "x", "th"))).capitalize()


SMALL_TALK: tuple[tuple[str, str, str], ...] = (
    ("Hello! What would you like to know?", "Hello|Hi|Hey|Good morning|Good evening|Good afternoon",
     "| there| again|, you| my friend|, computer"),
    ("I am well, thank you.",
     "How are you|How do you do|How are you doing|How is it going|Are you well|How do you feel",
     "?| today?| now?| this morning?| tonight?"),
    ("You are welcome.", "Thanks|Thank you|Many thanks|Thanks a lot|Great, thanks|Perfect, thank you",
     "|!|.| for that| for your help| so much"),
    ("Goodbye!", "Bye|Goodbye|See you|See you later|Good night|Farewell", "|!|.| then| for now| my friend"),
    (f"I am a tiny demonstration model of the edge runtime. {ONLY}",
     "Who are you|What are you|What is your name|Are you a person|Are you a robot|Who am I talking to|"
     "Introduce yourself", "?| exactly?| really?| then?|"),
)  # fmt: skip
ELSEWHERE = (
    "What do you think about {s}?", "Tell me about {s}.", "Write a poem about {s}.", "Write a story about {s}.",
    "Can you explain {s}?", "What do you know about {s}?", "Do you like {s}?", "Explain {s} to me.",
    "Give me some news about {s}.", "How does {s} work?", "Let us talk about {s}.", "What is {s}?",
)  # fmt: skip
PLACES = (
    "What is the weather like in {s}?", "What is the capital of {s}?", "Who is the president of {s}?", "Where is {s}?",
    "How do I get to {s}?", "Who was {s}?", "Who is {s}?", "Translate {s} into French.", "How many people live in {s}?",
)  # fmt: skip


def plain(text: str) -> str:
    """The text without what `vary` may change: the name of a question that is one of many ways to say the same."""
    return text.lower().rstrip("?.!")


def small_talk(rng: random.Random) -> list[Turn]:
    """A greeting, thanks, a question about the model itself, or something it does not know about."""
    if rng.random() < 0.5:
        answer, openings, endings = rng.choice(SMALL_TALK)
        question = rng.choice(openings.split("|")) + rng.choice(endings.split("|"))
        text = question if rng.random() < 0.6 else question.lower() if rng.random() < 0.6 else question.rstrip("?.!")
        return [Turn(plain(question), text, answer, answer)]
    if rng.random() < 0.5:
        question = rng.choice(ELSEWHERE).format(s=rng.choice(facts.SUBJECTS))
    elif rng.random() < 0.7:
        question = rng.choice(PLACES).format(s=rng.choice((invented(rng), rng.choice(facts.CITIES))))
    else:
        sign = rng.choice(("times", "divided by", "*", "/"))
        question = f"What is {rng.randrange(100)} {sign} {rng.randrange(1, 100)}?"
    return ask(rng, plain(question), question, ONLY)


# Recall of what was said earlier in the dialogue: the combination of what was said and how it is asked is held out.

TOLD = {
    "name": (("My name is {x}.", "I am {x}.", "I am called {x}.", "Call me {x}."), "Nice to meet you, {x}.",
             ("What is my name?", "Do you remember my name?", "Who am I?", "How am I called?"), "Your name is {x}.",
             "You have not told me your name."),
    "home": (("I live in {x}.", "My home is {x}.", "I come from {x}."), "{x} sounds nice.",
             ("Where do I live?", "Where is my home?", "Which place do I come from?"), "You live in {x}.",
             "You have not told me where you live."),
    "colour": (("My favourite colour is {x}.", "I like {x} best.", "The colour I like most is {x}."), "I like {x} too.",
               ("What is my favourite colour?", "Which colour do I like?", "What colour do I like best?"),
               "Your favourite colour is {x}.", "You have not told me your favourite colour."),
}  # fmt: skip


def recall(kind: str, rng: random.Random) -> list[Turn]:
    """The user tells their name, home or colour and asks for it later; sometimes they ask without having told it."""
    telling, heard, asking, answer, untold = TOLD[kind]
    tell, question = rng.choice(telling), rng.choice(asking)
    if rng.random() < 0.1:
        return ask(rng, "", question, untold)
    known = {"name": facts.NAMES, "home": facts.CITIES, "colour": facts.COLOURS}[kind]
    x = rng.choice(known) if kind == "colour" or rng.random() < 0.5 else invented(rng)
    message = tell.format(x=x) if rng.random() < 0.7 else tell.format(x=x).rstrip(".")
    message = message if rng.random() < 0.7 else message[0].lower() + message[1:]
    first = Turn("", message, heard.format(x=x), heard.format(x=x))
    return [first, *ask(rng, f"{tell} {question} {x}", question, answer.format(x=x), x)]


def memories(rng: random.Random) -> list[Turn]:
    """The user has two things with some memory each, and asks for the whole or for the larger."""
    (a, b), m, n = rng.sample(facts.THINGS, 2), rng.choice(facts.AMOUNTS), rng.choice(facts.AMOUNTS)
    both = f"a {a} with {m} GiB and a {b} with {n} GiB"
    message = rng.choice(("I have {x}.", "There is {x}.", "I own {x}.", "My devices are {x}.")).format(x=both)
    first = Turn("", message, f"Noted: {both}.", f"Noted: {both}.")
    if rng.random() < 0.5:
        question = rng.choice(("How much memory do I have in all?", "How much memory is that in all?",
                               "What is the total memory?", "How much do they have together?"))  # fmt: skip
        answer = f"{m} GiB plus {n} GiB is {m + n} GiB."
        return [first, *ask(rng, sum_key(m, n), question, answer, f"{m + n} GiB")]
    question = rng.choice(("Which of them has more?", "Which has more memory?", "Which one has more memory?"))
    best = f"the {a if m > n else b}" if m != n else "neither"
    answer = f"The {a} has {m} GiB and the {b} has {n} GiB, so {best} has more."
    return [first, *ask(rng, f"{both} more", question, answer, best.capitalize())]


RECALLS: dict[str, Topic] = {
    "name": lambda rng: recall("name", rng),
    "home": lambda rng: recall("home", rng),
    "colour": lambda rng: recall("colour", rng),
    "memories": memories,
}


# Answers in Markdown: lists, bold, and commands in code blocks.

SKILLS = (
    "I can help with four things:\n\n- **devices**: cores, memory, processor, year\n- **units**: time, length, weight, "
    "data\n- **sums**: plus and minus up to 99\n- **small talk**"
)
JOINERS = "These kinds of device can join:\n\n" + "\n".join(f"- {kind}s" for kind in facts.CATEGORIES_THAT_JOIN)
BOARDS = "I know these boards:\n\n" + "\n".join(f"- {d.name}" for d in facts.DEVICES if d.kind == facts.BOARD)
PHONES = "I know these phones:\n\n" + "\n".join(f"- {d.name}" for d in facts.DEVICES if d.kind == facts.PHONE)


def command(purpose: str, line: str) -> str:
    """A sentence and a fenced block with one command."""
    return f"{purpose}:\n\n```sh\n{line}\n```"


MARKDOWN: tuple[tuple[str, str, str], ...] = (
    (SKILLS, "What can you do|What do you know|What can I ask you|How can you help|What are you good at|Help", SKILLS),
    (JOINERS, "Which devices can join|Which devices can I use|What can join|What hardware can I use|What devices work",
     "Laptops, desktop computers, servers, mini PCs, single-board computers and Android phones"),
    (BOARDS, "Which boards do you know|List the boards|What boards are there|Name some boards", BOARDS),
    (PHONES, "Which phones do you know|List the phones|What phones are there|Name some phones", PHONES),
    (command("Start a worker with", "edge worker"),
     "How do I start a worker|How do I run a worker|How can I add a device|How does a device join", "`edge worker`"),
    (command("Start a chat with", "edge chat"),
     "How do I chat|How do I start a chat|How can I talk to you|How do I open the chat", "`edge chat`"),
)  # fmt: skip


def card(device: Device) -> str:
    """A device's facts as a bold title and a list."""
    joins = "yes" if device.joins else "no"
    return (f"**{device.name}**\n\n- kind: {device.kind}\n- cores: {device.cores}\n- processor: {device.processor}\n"
            f"- memory: {up_to(device)}\n- year: {device.year}\n- can join: {joins}")  # fmt: skip


def markdown(rng: random.Random) -> list[Turn]:
    """A question whose answer is a list, a command or a card."""
    if rng.random() < 0.5:
        device = rng.choice(facts.DEVICES)
        phrase = rng.choice(("Describe the {d}.", "Tell me about the {d}.", "List the facts about the {d}.",
                             "What do you know about the {d}?", "Give me a summary of the {d}."))  # fmt: skip
        question = phrase.format(d=device.name)
        return ask(rng, question, question, card(device))
    answer, openings, brief = rng.choice(MARKDOWN)
    question = rng.choice(openings.split("|")) + rng.choice((" here?", " exactly?", " then?", "?", " now?", ""))
    return ask(rng, plain(question), question, answer, brief)
