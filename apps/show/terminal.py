"""The interactive chat: a prompt with history, streamed Markdown, and commands that begin with a slash."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from apps.show import step_table
from apps.show.answer import STOPPED, LoadedChat, answer, dropped_line, end_line
from apps.show.answer_stream import AnswerStream
from apps.show.prompt_line import ALIASES, KEYS, PromptLine
from apps.show.table import print_columns
from devices.paths import expanded
from edge.ending import signals_are_for_the_program
from edge.errors import EdgeError, EngineError, Interrupted, WorkerError
from edge.llama.interrupt import interrupt_stops
from edge.llm.chat import Chat
from edge.llm.generate import Response
from edge.llm.info import memory_news
from edge.llm.sampler import MAX_SEED, SamplingParams
from edge.weights.adapter import parse_scale
from quant.text import count_text, counted, printable
from transport.errors import TransportError


def talk(loaded: LoadedChat, sampling: SamplingParams, *, max_tokens: int | None, stop: Sequence[str]) -> int:
    """Run the conversation until the user leaves; return the exit code.

    If one of several devices fails, the user can still save the conversation. Leaving then raises the error:
    WorkerError, EngineError or TransportError.
    """
    with signals_are_for_the_program():
        return _Talk(loaded, sampling, max_tokens, stop).run()


_BRINGS_BACK = "/retry asks it again, /edit or Up changes it first"


@dataclass(frozen=True)
class _Question:
    """A question that was not answered."""

    text: str
    again: bool  # it replaces the last exchange


class _Talk:
    def __init__(
        self, loaded: LoadedChat, sampling: SamplingParams, max_tokens: int | None, stop: Sequence[str]
    ) -> None:
        self._loaded, self._chat, self._deployed = loaded, loaded.chat, loaded.deployed
        self._sampling, self._max_tokens, self._stop = sampling, max_tokens, stop
        self._last: Response | None = None
        self._console = Console(highlight=False)
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("list these commands; also /?", self._help),
            "/retry": ("answer the last question again, with the next seed", self._retry),
            "/edit": ("change the last question and ask it again", self._edit),
            "/thought": ("show what the model thought before its last answer", self._show_thought),
            "/undo": ("remove the last question and its answer", self._undo),
            "/clear": ("start a new conversation", self._clear),
            "/system": ("TEXT: set the system message; -: remove it; without TEXT: show it", self._system),
            "/save": ("FILE: save the conversation", self._save),
            "/load": ("FILE: continue a saved conversation", self._load),
            "/image": (
                "FILE: attach a picture or sound to the next question; without FILE: detach all",
                partial(_attach, self._chat),
            ),
            "/audio": ("FILE: the same as /image", partial(_attach, self._chat)),
            "/lora": (
                "NAME SCALE: change the scale of an adapter from the next answer on; without NAME: show all",
                partial(_use_adapter, self._chat),
            ),
            "/stats": ("show figures of the last answer", self._stats),
            "/exit": ("leave; also exit", self._exit),
        }
        self._thought = ""  # thought before the last answer
        self._leaving = False
        self._draft = ""  # the last question, while it is being edited
        self._unanswered: _Question | None = None  # the last question, if it was stopped before its answer began
        self._lost: Exception | None = None  # error after which the engine cannot compute any more

    def run(self) -> int:
        engine = self._chat.engine
        name = self._loaded.name or engine.file.metadata.get("general.name") or engine.path.name
        self._console.print(
            f"[bold]{escape(printable(str(name)))}[/]  {engine.file.architecture},"
            f" {count_text(engine.shape.n_params)} parameters,"
            f" context {engine.context}, {counted(engine.threads, 'thread')}"
        )
        if engine.gpu_layers:
            self._dim(engine.gpu_layers.describe())
        if engine.paging and engine.paging.plan.pages:
            self._dim(engine.paging.plan.describe(engine.memory))
        if self._deployed:
            self._dim(self._deployed.line())
        self._console.print(f"[dim]{KEYS}, /help lists commands.[/]\n")
        if self._loaded.resumed is not None:
            _show_last_exchange(self._console, self._chat)
        prompt = PromptLine({name: what for name, (what, _) in self._commands.items()})
        while not self._leaving:
            draft, self._draft = self._draft, ""
            unanswered = self._unanswered
            try:
                line = prompt.read(draft)
            except KeyboardInterrupt:
                continue  # Ctrl-C at the prompt empties the line, and leaves the last question unchanged
            except EOFError:
                break
            line = ALIASES.get(line, line)
            if not line:
                continue
            try:
                if line.startswith("/"):
                    self._run_command(line)
                else:
                    # An edited question replaces the last exchange, unless that was never answered.
                    self._answer(line, again=unanswered.again if draft and unanswered else bool(draft))
                self._console.print()
            except KeyboardInterrupt:
                self._console.print()  # Ctrl-C was pressed again after the answer had stopped
            except (EdgeError, OSError) as error:
                self._console.print(f"[red]{escape(printable(str(error)))}[/]", soft_wrap=True)
                if self._deployed and isinstance(error, (EngineError, WorkerError, TransportError)):
                    # The engine fails from now on, but the conversation can still be saved.
                    self._lost = error
                    self._console.print("[dim]/save FILE saves the conversation, /exit leaves[/]")
                self._console.print()
        if self._lost is not None:
            raise self._lost
        return 0

    def _answer(self, text: str | None, *, again: bool = False) -> None:
        """Answer a question. again: replace the last exchange; without text, repeat its question."""
        stopped = False
        self._last, self._thought = None, ""
        self._unanswered = _Question(text or self._chat.last_question or "", again)
        responses = answer(self._chat, text, self._sampling, again=again, max_tokens=self._max_tokens, stop=self._stop)
        with interrupt_stops(self._chat.engine):
            try:
                first = next(responses)
                self._unanswered = None
                with AnswerStream(self._console, "; /thought shows it") as shown:
                    for response in itertools.chain((first,), responses):
                        self._last = response
                        shown.push(response.text, response.thought)
                        self._thought = shown.thought
            except (KeyboardInterrupt, Interrupted):
                stopped = True
            finally:
                responses.close()  # adds the partial answer to the conversation
        self._lost = None
        self._keep()
        if self._unanswered is not None:
            self._dim(f"{STOPPED}; {_BRINGS_BACK}")
        else:
            self._dim(self._stats_line(stopped))
        for line in memory_news(self._chat.engine):
            self._dim(line)

    def _keep(self) -> None:
        """Save the conversation, if it has a file."""
        if self._loaded.resumed is not None:
            self._chat.save(self._loaded.resumed)

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
            parts += [dropped_line(u)] if u.dropped_tokens else []
            parts += filter(None, [end_line(self._last, self._max_tokens, self._sampling)])
        if self._chat.dropped:
            parts.append(f"{self._chat.dropped} oldest messages forgotten")
        context = self._chat.engine.context
        parts.append(f"context {self._chat.context_used}/{context} ({100 * self._chat.context_used // context} %)")
        return "  ".join(parts)

    def _dim(self, text: str) -> None:
        """Print a dimmed line. It may contain text from files and other machines."""
        self._console.print(f"[dim]{escape(printable(text))}[/]", soft_wrap=True)

    def _run_command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word not in self._commands:
            self._console.print(f"[red]{escape(printable(word))} is not a command; /help lists them[/]")
            return
        if word in ("/save", "/load") and not rest.strip():
            self._console.print(f"[red]{word} needs a file name[/]")
            return
        self._commands[word][1](rest.strip())

    def _help(self, _: str) -> None:
        for name, (what, _run) in self._commands.items():
            self._console.print(f"  [bold]{name:8}[/] {escape(what)}")
        self._console.print(f"  [dim]{KEYS}[/]")

    def _retry(self, _: str) -> None:
        if self._unanswered is not None:
            self._answer(self._unanswered.text, again=self._unanswered.again)
        elif self._has_question():
            # The same seed would give the same answer.
            self._sampling = replace(self._sampling, seed=(self._sampling.seed + 1) % (MAX_SEED + 1))
            self._answer(None, again=True)

    def _edit(self, _: str) -> None:
        if self._unanswered is not None:
            self._draft = self._unanswered.text
        elif self._has_question():
            self._draft = self._chat.last_question or ""

    def _show_thought(self, _: str) -> None:
        for line in self._thought.splitlines() or ["the last answer has no thought"]:
            self._dim(line)

    def _undo(self, _: str) -> None:
        if self._has_question():
            self._chat.undo()
            self._changed(f"removed; {counted(len(self._chat.messages), 'message')} left")

    def _has_question(self) -> bool:
        if self._chat.last_question is None:
            self._console.print("[red]there is no question yet[/]")
        return self._chat.last_question is not None

    def _changed(self, message: str) -> None:
        """Reset the state of the last answer and save, because the conversation has changed."""
        self._last, self._thought, self._unanswered = None, "", None
        self._keep()
        self._console.print(f"[dim]{message}[/]")

    def _clear(self, _: str) -> None:
        self._chat.clear()
        self._changed("new conversation")

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = None if text == "-" else text
        self._dim(f"system: {self._chat.system or '(none)'}")

    def _save(self, path: str) -> None:
        target = expanded(path)
        self._chat.save(target)
        self._dim(f"saved {len(self._chat.messages)} messages to {target}")

    def _load(self, path: str) -> None:
        self._chat.load(expanded(path))
        self._changed(f"{len(self._chat.messages)} messages loaded")

    def _stats(self, _: str) -> None:
        rows = [("load", f"{self._loaded.seconds:.2f} s")]
        if self._last is not None:
            u, t = self._last.usage, self._last.timing
            rows += [
                (
                    "prompt",
                    f"{u.prompt_tokens} tokens, {u.cached_tokens} of them from the prefix cache,"
                    f" {u.restored_tokens} of these read from disk",
                ),
                ("prefill", f"{t.prefill_tokens_per_s:.1f} tokens/s"),
                ("TTFT", f"{t.ttft_s:.3f} s to the first token"),
                ("answer", f"{u.completion_tokens} tokens"),
                ("TPOT", f"{t.tpot_s * 1e3:.2f} ms for each token after the first"),
                ("decode", f"{t.decode_tokens_per_s:.1f} tokens/s"),
            ]
        context = f"{self._chat.context_used} of {self._chat.engine.context} tokens"
        if self._last is not None and self._last.usage.dropped_tokens:
            context += f"; the oldest {self._last.usage.dropped_tokens} were dropped during the last answer"
        rows.append(("context", context))
        rows.append(("kept", self._chat.engine.states.describe()))
        rows.append(("drafts", self._chat.drafter.describe() if self._chat.drafter else "none"))
        rows.append(("seed", str(self._sampling.seed)))
        paging = self._chat.engine.paging
        for name, text in paging.figures(self._chat.engine.memory) if paging else ():
            rows.append(("memory", text) if name == "memory" else ("reads", f"{name}: {text}"))
        for name, value in rows:
            self._console.print(f"  [bold]{name:8}[/] {escape(printable(value))}")
        if self._deployed:
            times = step_table.rows(self._deployed.names, self._deployed.times())
            print_columns(step_table.NAMES, times, whole=step_table.WHOLE)
            self._console.print(f"[dim]{step_table.NOTE}[/]")
            for line in self._deployed.link_lines():
                self._dim(f"link: {line}")

    def _exit(self, _: str) -> None:
        self._leaving = True


def _attach(chat: Chat, path: str) -> None:
    """Attach a picture or sound to the next question, or detach all if `path` is empty."""
    if not path:
        chat.detach()
        return
    n_tokens = chat.attach(expanded(path).read_bytes())
    print_columns(("before the next question", "tokens"), [(Path(path).name, str(n_tokens))])


def _use_adapter(chat: Chat, text: str) -> None:
    """Set the scale of an adapter from text "NAME SCALE", and print the scales of all adapters."""
    name, _, scale = text.rpartition(" ")
    notes, value = [], None
    try:
        value = parse_scale(scale, name) if name in chat.adapters else None
        if value is not None:
            chat.adapters[name] = value
        elif text:
            notes = ["change one with /lora NAME SCALE, such as /lora NAME 0.5"]
    except EngineError as error:
        notes = [str(error)]
    print_columns(("adapter", "scale"), [(name, f"{scale:g}") for name, scale in chat.adapters.items()], notes=notes)


def _show_last_exchange(console: Console, chat: Chat) -> None:
    """Print the last question and its answer, as they looked when they were new."""
    question = chat.last_question
    if question is None:
        return
    console.print(f"[bold cyan]>[/] {escape(printable(question, lines=True))}")
    last = chat.messages[-1]
    if last["role"] == "assistant":
        with AnswerStream(console) as shown:
            shown.push(last["content"])
    console.print()
