"""The interactive chat: a prompt with history, streamed Markdown, and commands that begin with a slash."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.markup import escape

from apps.show import step_table
from apps.show.answer import Loaded, answer
from apps.show.format import count_text, counted
from apps.show.markdown import MarkdownStream
from apps.show.memory_use import paging_rows
from apps.show.table import print_columns, printable
from edge.ending import signals_are_for_the_program
from edge.errors import EdgeError, EngineError, Interrupted, WorkerError
from edge.llama.interrupt import interrupt_stops
from edge.llm.generate import Response
from edge.llm.sampler import SamplingParams
from transport.errors import TransportError

KEYS = "Enter sends, Alt+Enter or Ctrl-J starts a new line, Ctrl-C stops an answer, Ctrl-D leaves"


def talk(loaded: Loaded, sampling: SamplingParams, *, max_tokens: int | None, stop: Sequence[str]) -> int:
    """Run the conversation until the person leaves; the exit code.

    Where one of several devices failed or was lost, the person can still save the conversation; then its error is
    raised: WorkerError, EngineError or a TransportError.
    """
    with signals_are_for_the_program():
        return _Talk(loaded, sampling, max_tokens, stop).run()


class _Talk:
    def __init__(self, loaded: Loaded, sampling: SamplingParams, max_tokens: int | None, stop: Sequence[str]) -> None:
        self._chat, self._deployed, self._load_s = loaded.chat, loaded.deployed, loaded.seconds
        self._sampling, self._max_tokens, self._stop = sampling, max_tokens, stop
        self._last: Response | None = None
        self._console = Console(highlight=False)
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("what you can type", self._help),
            "/clear": ("forget the conversation", self._clear),
            "/system": ("TEXT: set the system message; -: remove it; nothing: show it", self._system),
            "/save": ("FILE: save the conversation", self._save),
            "/load": ("FILE: continue a saved one", self._load),
            "/stats": ("figures of the last answer", self._stats),
            "/exit": ("leave", self._exit),
        }
        self._leaving = False
        self._lost: Exception | None = None  # why nothing can be computed any more, where that is so

    def run(self) -> int:
        engine = self._chat.engine
        name = engine.file.metadata.get("general.name") or engine.path.name
        self._console.print(
            f"[bold]{escape(str(name))}[/]  {engine.file.architecture}, {count_text(engine.shape.n_params)} parameters,"
            f" context {engine.context}, {counted(engine.threads, 'thread')}"
        )
        if self._deployed:
            self._console.print(f"[dim]{escape(printable(self._deployed.line()))}[/]", soft_wrap=True)
        self._console.print(f"[dim]{KEYS}, /help lists commands.[/]\n")
        session: PromptSession[str] = PromptSession(
            history=_history(), completer=_Commands(self._commands), key_bindings=_keys(), multiline=True
        )
        while not self._leaving:
            try:
                line = session.prompt([("bold fg:ansicyan", "> ")], prompt_continuation="  ").strip()
            except KeyboardInterrupt:
                continue  # Ctrl-C at the prompt empties the line
            except EOFError:
                break
            if not line:
                continue
            try:
                if line.startswith("/"):
                    self._run_command(line)
                else:
                    self._answer(line)
                    self._lost = None
            except KeyboardInterrupt:
                self._console.print()  # pressed once more than was needed to stop the answer
            except (EdgeError, OSError, TransportError) as error:
                self._console.print(f"[red]{escape(printable(str(error)))}[/]", soft_wrap=True)
                if self._deployed and isinstance(error, (EngineError, WorkerError, TransportError)):
                    # The engine says the same to whatever is asked from now on, but what was said is still here.
                    self._lost = error
                    self._console.print("[dim]/save FILE keeps the conversation, /exit leaves[/]")
                self._console.print()
        if self._lost is not None:
            raise self._lost
        return 0

    def _answer(self, text: str) -> None:
        stopped = False
        self._last = None
        responses = answer(self._chat, text, self._sampling, max_tokens=self._max_tokens, stop=self._stop)
        with interrupt_stops(self._chat.engine):
            try:
                first = next(responses)
                with MarkdownStream(self._console) as shown:
                    for response in itertools.chain((first,), responses):
                        self._last = response
                        shown.push(response.text)
            except (KeyboardInterrupt, Interrupted):
                stopped = True
            finally:
                responses.close()  # what was said so far joins the conversation
        self._console.print(f"[dim]{self._stats_line(stopped)}[/]\n", soft_wrap=True)

    def _stats_line(self, stopped: bool) -> str:
        parts = ["stopped"] if stopped else []
        if self._last is not None:
            u, t = self._last.usage, self._last.timing
            parts += [
                f"{u.completion_tokens} tokens",
                f"TTFT {t.ttft_s:.2f} s",
                f"TPOT {t.tpot_s * 1e3:.1f} ms",
                f"{t.decode_tokens_per_s:.1f} tokens/s",
            ]
        if self._chat.dropped:
            parts.append(f"{self._chat.dropped} oldest messages forgotten")
        context = self._chat.engine.context
        parts.append(f"context {self._chat.context_used}/{context} ({100 * self._chat.context_used // context} %)")
        return "  ".join(parts)

    # Commands.

    def _run_command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word not in self._commands:
            self._console.print(f"[red]{escape(word)} is not a command; /help lists them[/]\n")
            return
        self._commands[word][1](rest.strip())
        self._console.print()

    def _help(self, _: str) -> None:
        for name, (what, _run) in self._commands.items():
            self._console.print(f"  [bold]{name:8}[/] {escape(what)}")
        self._console.print(f"  [dim]{KEYS}[/]")

    def _clear(self, _: str) -> None:
        self._chat.clear()
        self._last = None
        self._console.print("[dim]conversation forgotten[/]")

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = None if text == "-" else text
        self._console.print(f"[dim]system: {escape(self._chat.system or '(none)')}[/]")

    def _save(self, path: str) -> None:
        if not path:
            self._console.print("[red]/save needs a file name[/]")
            return
        target = Path(path).expanduser()
        self._chat.save(target)
        self._console.print(
            f"[dim]saved {len(self._chat.messages)} messages to {escape(str(target))}[/]", soft_wrap=True
        )

    def _load(self, path: str) -> None:
        if not path:
            self._console.print("[red]/load needs a file name[/]")
            return
        self._chat.load(Path(path).expanduser())
        self._console.print(f"[dim]{len(self._chat.messages)} messages loaded[/]")

    def _stats(self, _: str) -> None:
        rows = [("load", f"{self._load_s:.2f} s")]
        if self._last is not None:
            u, t = self._last.usage, self._last.timing
            rows += [
                ("prompt", f"{u.prompt_tokens} tokens, {u.cached_tokens} of them already held"),
                ("prefill", f"{t.prefill_tokens_per_s:.1f} tokens/s"),
                ("TTFT", f"{t.ttft_s:.3f} s"),
                ("answer", f"{u.completion_tokens} tokens"),
                ("TPOT", f"{t.tpot_s * 1e3:.2f} ms"),
                ("decode", f"{t.decode_tokens_per_s:.1f} tokens/s"),
            ]
        rows.append(("context", f"{self._chat.context_used} of {self._chat.engine.context} tokens"))
        rows.append(("seed", str(self._sampling.seed)))
        for name, text in paging_rows(self._chat.engine):
            rows.append(("memory", text) if name == "memory" else ("reads", f"{name}: {text}"))
        for name, value in rows:
            self._console.print(f"  [bold]{name:8}[/] {value}")
        if self._deployed:
            times = step_table.rows(self._deployed.names, self._deployed.times())
            print_columns(step_table.NAMES, times, whole=step_table.WHOLE)
            self._console.print(f"[dim]{step_table.NOTE}[/]")
            for line in self._deployed.link_lines():
                self._console.print(f"[dim]link: {escape(printable(line))}[/]", soft_wrap=True)

    def _exit(self, _: str) -> None:
        self._leaving = True


class _Commands(Completer):
    """Completes a slash at the beginning of a line to the commands."""

    def __init__(self, commands: dict[str, tuple[str, Callable[[str], None]]]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        word = document.text_before_cursor
        if not word.startswith("/") or " " in word:
            return
        for name, (what, _) in self._commands.items():
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

    return keys


def _history() -> History:
    """What was typed before, in a file only its owner may read; in memory where that file cannot be made."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edge"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / "chat_history"
        file.touch(mode=0o600)
        return FileHistory(file)
    except OSError:
        return InMemoryHistory()
