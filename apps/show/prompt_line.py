"""The line a conversation is typed into: its keys, its history, and what it completes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from devices.paths import state_folder

KEYS = "Enter sends, Alt+Enter or Ctrl-J starts a new line, Ctrl-C stops an answer, Ctrl-D leaves"


class PromptLine:
    """Reads what a person types."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        """commands: what each does, by name with its slash."""
        self._session: PromptSession[str] = PromptSession(
            history=_history(), completer=_Commands(commands), key_bindings=_keys(), multiline=True
        )

    def read(self, draft: str = "") -> str:
        """What was typed, or made of `draft`. KeyboardInterrupt on Ctrl-C, EOFError on Ctrl-D."""
        return self._session.prompt([("bold fg:ansicyan", "> ")], prompt_continuation="  ", default=draft).strip()


class _Commands(Completer):
    """Completes a slash at the beginning of a line to the commands."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        word = document.text_before_cursor
        if not word.startswith("/") or " " in word:
            return
        for name, what in self._commands.items():
            if name.startswith(word):
                yield Completion(name, start_position=-len(word), display_meta=what)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-z")
    def _suspend(event: KeyPressEvent) -> None:
        event.app.suspend_to_background()

    return keys


def _history() -> History:
    """What was typed before, in a file only its owner may read; in memory where that file cannot be made."""
    file = state_folder() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        return FileHistory(file)
    except OSError:
        return InMemoryHistory()
