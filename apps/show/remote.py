"""Conversation with a server, in a terminal or for a script."""

from __future__ import annotations

import base64
import mimetypes
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.show.answer import PlainAnswer
from apps.show.progress import say
from apps.show.table import print_json
from devices.paths import expanded

if TYPE_CHECKING:
    from edge.net.chat_client import ServerChat

_COMMANDS = {
    "/help": "list these commands; also /?",
    "/image": "FILE: attach a picture or sound to the next question",
    "/audio": "FILE: the same as /image",
    "/clear": "start a new conversation",
    "/exit": "leave; also exit",
}


def media_part(path: Path) -> dict[str, Any]:
    """Return a picture or sound as a part of a message. Raises OSError if the file cannot be read."""
    data, kind = path.read_bytes(), mimetypes.guess_type(path.name)[0] or "image/png"
    text = base64.b64encode(data).decode()
    if kind.startswith("audio/"):
        return {"type": "input_audio", "input_audio": {"data": text, "format": path.suffix[1:].lower()}}
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{text}"}}


def answer_once(chat: ServerChat, prompt: str, options: Mapping[str, Any], *, as_json: bool) -> int:
    """Print one answer; return the exit code. Raises TransportError if the server cannot be reached."""
    pieces, shown = [], PlainAnswer()
    for piece in chat.ask(prompt, options):
        pieces.append(piece)
        if not as_json:
            shown.write(*piece)
    if as_json:
        text, thought = ("".join(parts) for parts in zip(*pieces, strict=True)) if pieces else ("", "")
        values = {"text": text, "thought": thought, "finish_reason": chat.finish_reason, "usage": chat.usage}
        print_json(values, escaped=False)
    else:
        sys.stdout.write("\n")
        if line := end_line(chat):
            say(line, command="chat")
    return 0


def end_line(chat: ServerChat) -> str | None:
    """Return a line that reports that the server ended a repeating answer, or None if it did not."""
    if chat.finish_reason != "repetition":
        return None
    return "the answer repeats itself, so the server ended it; --allow-repetition lets it continue"


def talk(chat: ServerChat, options: Mapping[str, Any]) -> int:
    """Send each line that a user types, until they leave; return the exit code."""
    from rich.console import Console
    from rich.markup import escape

    from apps.show.answer import STOPPED
    from apps.show.answer_stream import AnswerStream
    from apps.show.prompt_line import ALIASES, KEYS, PromptLine
    from quant.text import printable
    from transport.errors import TransportError

    console, prompt, system = Console(), PromptLine(_COMMANDS), list(chat.messages)
    console.print(f"[dim]{KEYS}[/]\n")
    while True:
        waits = False  # True until the first piece of an answer arrives
        try:
            line = prompt.read()
            line = ALIASES.get(line, line)
            if line == "/exit":
                return 0
            command, _, rest = line.partition(" ")
            if line == "/help":
                for name, what in _COMMANDS.items():
                    console.print(f"  [bold]{name:8}[/] {escape(what)}")
            elif line == "/clear":
                chat.messages, chat.attached = list(system), []
            elif command in ("/image", "/audio"):
                chat.attached.append(media_part(expanded(rest.strip())))
            elif line:
                waits = True
                with AnswerStream(console) as shown:
                    for piece in chat.ask(line, options):
                        waits = False
                        shown.push(*piece)
                if words := end_line(chat):
                    console.print(f"[dim]{escape(printable(words))}[/]", soft_wrap=True)
            console.print()
        except KeyboardInterrupt:
            if waits:
                console.print(f"[dim]{STOPPED}; Up brings it back[/]", soft_wrap=True)
            console.print()  # the server notices the closed stream and stops
        except EOFError:
            return 0
        except (OSError, TransportError) as error:
            console.print(f"[red]{escape(printable(str(error)))}[/]\n", soft_wrap=True)
