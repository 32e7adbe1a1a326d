"""Input line of a conversation: keys, history and completion."""

from __future__ import annotations

from collections.abc import Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import ConditionalCompleter, WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from devices.files import make_private
from devices.paths import state_folder

KEYS = "Enter sends, Alt+Enter or Ctrl-J starts a new line, Ctrl-C stops an answer, Ctrl-D leaves"

ALIASES = {"exit": "/exit", "quit": "/exit", "/quit": "/exit", "/?": "/help"}  # commands of a conversation, by alias


class PromptLine:
    """Reads lines that a user types."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        """commands: descriptions of commands, by name with its slash."""
        names = WordCompleter(list(commands), meta_dict=commands, sentence=True)
        completer = ConditionalCompleter(names, _begins_with_a_slash)
        self._session: PromptSession[str] = PromptSession(
            history=_history(), completer=completer, key_bindings=_keys(), multiline=True
        )

    def read(self, draft: str = "") -> str:
        """Return the typed line; `draft` is its text at the start.

        Raises KeyboardInterrupt on Ctrl-C and EOFError on Ctrl-D.
        """
        return self._session.prompt([("bold fg:ansicyan", "> ")], prompt_continuation="  ", default=draft).strip()


@Condition
def _begins_with_a_slash() -> bool:
    return get_app().current_buffer.document.text_before_cursor.startswith("/")


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
    """Return the history, stored in a file that only its owner may read, or in memory if that is not possible."""
    file = state_folder() / "chat_history"
    try:
        make_private(file.parent)
        file.touch(mode=0o600)
        return FileHistory(file)
    except OSError:
        return InMemoryHistory()
