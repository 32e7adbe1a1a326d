"""Run tokenization on a large stack.

llama.cpp splits text into words with `std::regex`, which recurses for each character of a word. A word of 26,000
characters overflows an ordinary stack and crashes the process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

from edge.errors import ContextFull, EngineError
from edge.llama.interrupt import deferred_interrupts

T = TypeVar("T")

MOST_UNBROKEN = 1 << 18  # maximum length of a word in characters
SHORT = 2000  # a text of this many characters fits on any stack
_CHARACTER_BYTES = 1024  # stack for one character of a word; 320 measured with GCC on x86-64
_OWN_BYTES = 1 << 20  # stack for everything else

# No tokenizer has such a character inside a word. A run of spaces can be a word, too.
_BREAKS = {
    "exaone-moe": re.compile(r"[^\w\s]|\d"),  # a single space between letters is part of a word
    "": re.compile(r"\s"),
}
_NO_SPACE = re.compile(r"\S")
# These tokenizers search from many characters of a run to its end. 8,000 digits or 130,000 spaces take more than ten
# seconds.
_QUADRATIC = {
    "superbpe": ("number", 4096, re.compile(r"\D")),
    "jais-2": ("row of spaces", 32768, _NO_SPACE),
}
_SPACES = re.compile(r"(\s)\s+")

_starting = threading.Lock()  # the stack size of new threads is a global setting of the interpreter


def check_unbroken(text: str, pre: str) -> None:
    """Raise ContextFull if the text has a word that needs too much stack or time to tokenize.

    pre: name of the pre-tokenizer (`tokenizer.ggml.pre`).
    """
    breaks = _BREAKS.get(pre, _BREAKS[""])
    if any(_lacks(text, MOST_UNBROKEN, pattern) for pattern in (breaks, _NO_SPACE)):
        raise _too_long("stretch", MOST_UNBROKEN)
    if pre in _QUADRATIC:
        what, most, pattern = _QUADRATIC[pre]
        if _lacks(text, most, pattern):
            raise _too_long(what, most)


def _too_long(what: str, most: int) -> ContextFull:
    return ContextFull(
        f"the text has a {what} of more than {most // 2} characters without a break, and this model's tokenizer takes"
        f" at most {most}; put other characters between them, such as line breaks, or send less"
    )


def without_rows_of_spaces(text: str) -> str:
    """Return the text with each run of spaces reduced to one space.

    The pre-tokenizer `whitespace` drops spaces, and llama.cpp aborts the process on two spaces in a row.
    """
    return _SPACES.sub(r"\1", text)


def _lacks(text: str, n: int, pattern: re.Pattern[str]) -> bool:
    """Return whether n consecutive characters lack the pattern. May be True for some texts with only n / 2 such
    characters.

    One search for each half of n keeps the time linear in the length of the text.
    """
    half = n // 2
    return any(not pattern.search(text, at, at + half) for at in range(0, len(text) - half + 1, half))


def with_deep_stack(work: Callable[[], T], n_characters: int) -> T:
    """Call `work` in a thread with enough stack for a word of `n_characters` characters, and return its result.

    Raises the errors of `work`, or EngineError if the stack cannot be allocated.
    """
    outcomes: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcomes.append(work())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="tokenizing", daemon=True)
    n_bytes = _OWN_BYTES + min(n_characters, MOST_UNBROKEN) * _CHARACTER_BYTES
    with deferred_interrupts():  # otherwise an interrupt might close the model while the thread reads it
        with _starting:
            before = threading.stack_size(n_bytes)
            try:
                thread.start()
            except RuntimeError as error:
                raise EngineError(
                    f"there is no room for a stack of {n_bytes >> 20} MiB to tokenize {n_characters} characters; send"
                    " less at once, or allow the process more memory"
                ) from error
            finally:
                threading.stack_size(before)
        thread.join()
    if errors:
        raise errors[0]
    return outcomes[0]
