"""Stacks for tokenizing: llama.cpp cuts texts into words with `std::regex`, which calls itself for each character of a
word. A word of 26,000 characters overflows an ordinary stack, and that ends the process."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

from edge.errors import ContextFull, EngineError
from edge.llama.interrupt import deferred_interrupts

T = TypeVar("T")

MOST_UNBROKEN = 1 << 18  # characters that one word may have
SHORT = 2000  # characters of a text that every stack has room for
_CHARACTER_BYTES = 1024  # of stack for a character of a word; measured: 320 with GCC on x86-64
_OWN_BYTES = 1 << 20  # of stack for everything else

# A word holds no character of this kind, whichever the tokenizer. Spaces, too, can be one word.
_BREAKS = {
    "exaone-moe": re.compile(r"[^\w\s]|\d"),  # single spaces between letters are part of a word
    "": re.compile(r"\s"),
}
_NO_SPACE = re.compile(r"\S")
# These look from many characters of a stretch to its end: 8,000 digits, or 130,000 spaces, take more than ten seconds.
_QUADRATIC = {
    "superbpe": ("number", 4096, re.compile(r"\D")),
    "jais-2": ("row of spaces", 32768, _NO_SPACE),
}
_SPACES = re.compile(r"(\s)\s+")

_starting = threading.Lock()  # the size of stacks is one for the interpreter


def check_unbroken(text: str, pre: str) -> None:
    """Raise ContextFull for a text that has a word which tokenizing has no stack or time for.

    pre: name of the pre-tokenizer, as `tokenizer.ggml.pre` says it.
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
    """Return a text with one space for each row of them: the pre-tokenizer `whitespace` drops spaces, and llama.cpp
    stops the process if there are two."""
    return _SPACES.sub(r"\1", text)


def _lacks(text: str, n: int, pattern: re.Pattern[str]) -> bool:
    """Return whether n characters in a row lack the pattern. True for some texts where only n / 2 do: one search for
    each half of n is linear in the length of the text."""
    half = n // 2
    return any(not pattern.search(text, at, at + half) for at in range(0, len(text) - half + 1, half))


def with_deep_stack(work: Callable[[], T], n_characters: int) -> T:
    """Return what `work` returns in a thread whose stack has room for a word of so many characters. Raise its errors;
    EngineError if there is no room for such a stack."""
    outcomes: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcomes.append(work())
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="tokenizing", daemon=True)
    n_bytes = _OWN_BYTES + min(n_characters, MOST_UNBROKEN) * _CHARACTER_BYTES
    with deferred_interrupts():  # else the model might be closed while the thread reads it
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
