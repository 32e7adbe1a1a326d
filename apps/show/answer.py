"""Answers of a chat: a progress bar until the first token, then the text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apps.show.progress import progress
from quant.text import printable

if TYPE_CHECKING:
    from edge.deployment.deployed import DeployedModel
    from edge.llm.chat import Chat
    from edge.llm.generate import Response, Usage
    from edge.llm.sampler import SamplingParams


STOPPED = "stopped before the answer began; the question was removed from the conversation"


@dataclass(frozen=True)
class LoadedChat:
    """A loaded chat, and how it was loaded."""

    chat: Chat
    seconds: float  # time that loading took
    deployed: DeployedModel | None  # the deployment, if it runs on several devices
    resumed: Path | None = None  # file in which the conversation is saved after each answer
    name: str | None = None  # name of the model as the user typed it; None: the bundled model


def dropped_line(usage: Usage) -> str:
    """Return a line that reports that the context was full."""
    return f"context full: the oldest {usage.dropped_tokens} tokens were dropped"


class PlainAnswer:
    """Writes an answer to standard output piece by piece.

    Thoughts go to standard error, dimmed, and only if it is a terminal. Control characters are removed for a terminal
    and kept for a file or pipe.
    """

    def __init__(self) -> None:
        self._shows_thought = False

    def write(self, text: str, thought: str) -> None:
        """Write the next piece of the answer."""
        if thought and sys.stderr.isatty():
            self._shows_thought = True
            sys.stderr.write(f"\x1b[2m{printable(thought, lines=True)}\x1b[22m")
            sys.stderr.flush()
        if text and self._shows_thought:
            self._shows_thought = False
            sys.stderr.write("\n\n")
            sys.stderr.flush()
        if text:
            sys.stdout.write(printable(text, lines=True) if sys.stdout.isatty() else text)
            sys.stdout.flush()


def end_line(response: Response, max_tokens: int | None, sampling: SamplingParams) -> str | None:
    """Return a line that explains why an answer was cut off, or None if it was complete or reached `max_tokens`."""
    usage = response.usage
    if response.finish_reason == "repetition":
        line = f"{response.repetition}; the answer ends here, --allow-repetition lets it continue"
    elif usage.thought_tokens and usage.thought_tokens == usage.completion_tokens:
        line = "the model was still thinking and gave no answer; --think N limits thinking to N tokens, --think off"
        line += " turns it off"
    elif response.finish_reason == "length" and usage.completion_tokens != max_tokens:
        line = "the answer ends here: the context is full; --context N makes it larger"
    else:
        return None
    if sampling.json_schema is not None:
        return f"{line}; the JSON is incomplete"
    return line if sampling.grammar is None else f"{line}; the text does not complete the grammar"


def answer(
    chat: Chat,
    text: str | None,
    sampling: SamplingParams,
    *,
    max_tokens: int | None,
    stop: Sequence[str],
    again: bool = False,
) -> Generator[Response, None, None]:
    """Yield the responses of `Chat.ask`, or of `Chat.retry` if `again`. A progress bar shows until the first token."""
    ask: Callable[..., Iterator[Response]] = chat.retry if again else chat.ask
    with progress("Reading the prompt", unit="tokens") as show:
        responses = ask(text, sampling, max_tokens=max_tokens, stop=stop, on_prefill=show)
        first = next(responses)
    yield first
    yield from responses
