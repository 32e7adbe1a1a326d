"""`edge chat` on a terminal, typed into and read like a person does."""

import json
import os
import re
import signal
import stat
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from apps.show import terminal as conversation
from apps.show.answer import LoadedChat
from apps.show.answer import answer as own_answer
from edge.errors import WorkerError
from edge.llm.chat import Chat
from edge.llm.engine import load
from edge.llm.generate import Response
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from partition.model.file import ModelFile
from tests.support.helpers import ENDLESS, Terminal

STATS = r"TTFT [\d.]+ s  TPOT [\d.]+ ms  [\d.]+ tokens/s  context (\d+)/\d+ \(\d+ %\)"
UP, ALT_ENTER, CTRL_C, CTRL_D, CTRL_J, CTRL_Z = "\x1b[A", "\x1b\r", "\x03", "\x04", "\n", "\x1a"

Open = Callable[..., Terminal]


@contextmanager
def opening(folder: Path) -> Iterator[Open]:
    """A function of options: a chat that shows its prompt; its answers are random letters, 5 tokens unless told."""
    grammar = folder / "endless.gbnf"
    grammar.write_text(ENDLESS)
    opened = []

    def open_one(*options: str | Path) -> Terminal:
        terminal = Terminal("--grammar", grammar, "--max-tokens", "5", *options, state=folder)
        opened.append(terminal)
        terminal.ready()
        return terminal

    yield open_one
    for terminal in opened:
        terminal.close()


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Open]:
    """Opens chats of this test alone."""
    with opening(tmp_path) as open_one:
        yield open_one


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A chat without further options. A start takes most of a second."""
    with opening(tmp_path_factory.mktemp("usual")) as open_one:
        yield open_one()


@pytest.fixture
def chat(usual: Terminal) -> Terminal:
    """That chat, with nothing asked yet."""
    usual.enter("/clear")
    usual.sees("new conversation")
    usual.ready()
    return usual


def ask(chat: Terminal, text: str) -> str:
    """Ask and wait for the answer and the next prompt; what was shown."""
    chat.enter(text)
    shown = chat.sees(STATS)
    chat.ready()
    return shown


def saved(chat: Terminal, path: Path) -> list[dict[str, Any]]:
    """The messages so far, through /save."""
    chat.enter(f"/save {path}")
    chat.sees(r"saved \d+ messages")
    chat.ready()
    messages: list[dict[str, Any]] = json.loads(path.read_text())["messages"]
    return messages


def test_greeting_names_the_model_and_the_keys(tmp_path: Path) -> None:
    chat = Terminal(state=tmp_path)
    chat.sees(r"llama, 7\.\d+ M parameters, context \d+, 1 thread\b")
    chat.sees("Enter sends.*Ctrl-D leaves, /help lists commands")
    chat.ready()
    chat.close()


def test_an_answer_is_shown_and_its_figures_follow(chat: Terminal, tmp_path: Path) -> None:
    chat.enter("What is 2 plus 3?")
    shown = chat.sees("5 tokens  " + STATS)
    chat.ready()
    question, answer = saved(chat, tmp_path / "chat")
    assert question == {"role": "user", "content": "What is 2 plus 3?"}
    assert answer["content"] in shown


def test_an_answer_is_streamed(open_chat: Open) -> None:
    chat = open_chat("--max-tokens", "8000", "--context", "8192")
    chat.enter("1")
    chat.sees("[a-z]{10}")  # long before it is complete
    chat.type(CTRL_C)
    chat.sees(STATS)


def test_help_lists_the_commands(chat: Terminal) -> None:
    chat.enter("/help")
    shown = chat.sees("Enter sends")
    chat.ready()
    for command in ("/help", "/retry", "/edit", "/undo", "/clear", "/system", "/save", "/load", "/stats", "/exit"):
        assert command in shown


def test_an_unknown_command_is_said_to_be_one(chat: Terminal) -> None:
    chat.enter("/dance")
    chat.sees("/dance is not a command; /help lists them")
    chat.ready()


def test_clear_forgets_the_conversation_but_not_the_system_message(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat("--system", "Answer briefly.")
    ask(chat, "one")
    chat.enter("/clear")
    chat.sees("new conversation")
    chat.ready()
    assert saved(chat, tmp_path / "chat") == [{"role": "system", "content": "Answer briefly."}]


def test_the_last_exchange_is_answered_again_edited_and_taken_back(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat("--seed", "7", "--temperature", "5", "--top-k", "0", "--min-p", "0", "--max-tokens", "12")
    for command in ("/retry", "/edit", "/undo"):
        chat.enter(command)
        chat.sees("there is no question yet")
        chat.ready()
    ask(chat, "one")
    before = saved(chat, tmp_path / "first")
    ask(chat, "/retry")
    again = saved(chat, tmp_path / "again")
    assert again[0] == before[0]
    assert again[1] != before[1]  # of another seed
    assert len(again) == 2
    chat.enter("/edit")
    chat.ready()
    chat.type(CTRL_C)  # changes nothing
    chat.ready()
    assert saved(chat, tmp_path / "kept") == again
    chat.enter("/edit")
    chat.ready()
    ask(chat, " more")
    assert [m["content"] for m in saved(chat, tmp_path / "edited")][::2] == ["one more"]
    chat.enter("/undo")
    chat.sees("0 messages left")
    chat.ready()
    assert saved(chat, tmp_path / "undone") == []


def test_ctrl_z_at_the_prompt_suspends_and_what_was_typed_is_there_again(tmp_path: Path) -> None:
    shell = Terminal("--max-tokens", "5", state=tmp_path, under=["sh", "-c", 'set -m; "$@"; echo is stopped; fg', "sh"])
    shell.ready()
    shell.type("what was typ" + CTRL_Z)
    shell.sees("is stopped")
    shell.ready()
    shell.type("ed\r")
    shell.sees(STATS)
    shell.ready()
    assert [m["content"] for m in saved(shell, tmp_path / "chat")][::2] == ["what was typed"]
    shell.type(CTRL_D)
    assert shell.ends() == 0
    shell.close()


def test_system_shows_and_sets_the_system_message(chat: Terminal, tmp_path: Path) -> None:
    chat.enter("/system")
    chat.sees(r"system: \(none\)")
    chat.ready()
    chat.enter("/system You are a lighthouse.")
    chat.sees("system: You are a lighthouse.")
    chat.ready()
    assert saved(chat, tmp_path / "chat") == [{"role": "system", "content": "You are a lighthouse."}]
    chat.enter("/system -")
    chat.sees(r"system: \(none\)")
    chat.ready()
    assert saved(chat, tmp_path / "chat") == []


def test_stats_show_the_figures_of_the_last_answer(open_chat: Open) -> None:
    chat = open_chat("--seed", "42")
    ask(chat, "one")
    chat.enter("/stats")
    shown = chat.sees(r"seed\s+\S*\s42")
    for name in ("load", "prompt", "prefill", "answer", "decode", "context"):
        assert name in shown
    assert re.search(r"TTFT +\S* [\d.]+ s to the first token", shown)
    assert re.search(r"TPOT +\S* [\d.]+ ms for each token after the first", shown)


def test_stats_show_a_file_by_its_whole_name(open_chat: Open, tmp_path: Path) -> None:
    draft = tmp_path / "small[red].gguf"
    draft.symlink_to(MODEL_PATH)
    chat = open_chat("--draft", draft)
    chat.enter("/stats")
    chat.sees(r"drafts\s+\S* small\[red\]\.gguf: ")


def test_one_empty_line_is_between_an_answer_and_the_next_prompt(open_chat: Open) -> None:
    chat = open_chat("--max-tokens", "3")
    gaps = []
    for line, shown in (
        ("one", STATS),
        ("/retry", STATS),
        ("/seed", "help lists them"),
        ("/clear", "new conversation"),
    ):
        chat.enter(line)
        chat.sees(shown)
        gaps.append(chat.ready().count("\n"))
    assert gaps == [2, 2, 2, 2]  # the end of the line, and an empty one


def test_a_full_context_is_said_to_be(open_chat: Open) -> None:
    chat = open_chat("--context", "64", "--max-tokens", "100")
    chat.enter("What is 2 plus 3?")
    dropped = re.search(r"context full: the oldest (\d+) tokens were dropped", chat.sees(r"context \d+/64 "))
    assert dropped is not None
    chat.ready()
    chat.enter("/stats")
    chat.sees(rf"of 64 tokens; the oldest {dropped[1]} were dropped during the last answer")
    chat.ready()


def test_stats_show_what_a_budget_is_used_for(open_chat: Open) -> None:
    chat = open_chat("--seed", "42", "--memory", "1GiB")
    ask(chat, "one")
    chat.enter("/stats")
    shown = chat.sees(r"seed\s+\S*\s42[\s\S]*?resident weights")
    assert "KV cache" in shown


def test_exit_leaves(open_chat: Open) -> None:
    chat = open_chat()
    chat.enter("/exit")
    assert chat.ends() == 0


def test_a_saved_conversation_goes_on_in_another_process(open_chat: Open, tmp_path: Path) -> None:
    first = open_chat()
    ask(first, "one")
    before = saved(first, tmp_path / "first")
    second = open_chat()
    second.enter(f"/load {tmp_path / 'first'}")
    second.sees("2 messages loaded")
    second.ready()
    ask(second, "two")
    after = saved(second, tmp_path / "second")
    assert [message["role"] for message in after] == ["user", "assistant", "user", "assistant"]
    assert after[:2] == before
    assert after[2]["content"] == "two"


def test_a_saved_conversation_is_private(chat: Terminal, tmp_path: Path) -> None:
    ask(chat, "one")
    saved(chat, tmp_path / "chat")
    assert stat.S_IMODE((tmp_path / "chat").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("*chat*")] == ["chat"]  # nothing temporary stays


def test_files_that_cannot_be_saved_or_loaded_are_said_in_a_line(chat: Terminal, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "notes").write_text("buy milk")
    for line, complaint in (
        ("/save", "/save needs a file name"),
        ("/load", "/load needs a file name"),
        (f"/load {tmp_path}/none", r"cannot\s+be\s+read:\s+No\s+such\s+file"),
        (f"/load {tmp_path}/list", "not a saved chat"),
        (f"/load {tmp_path}/notes", r"not\s+a\s+saved\s+chat:\s+it\s+is\s+not\s+JSON"),
        (f"/save {tmp_path}/none/chat", r"there\s+is\s+no\s+folder"),
        (f"/save {tmp_path}/list", r"exists\s+and\s+is\s+not\s+a\s+saved\s+chat"),
    ):
        chat.enter(line)
        shown = chat.sees(complaint)
        assert "Traceback" not in shown
        assert "[Errno" not in shown
        chat.ready()


@pytest.mark.parametrize("keys", [ALT_ENTER, CTRL_J])
def test_new_lines_in_a_prompt(chat: Terminal, tmp_path: Path, keys: str) -> None:
    ask(chat, f"first{keys}second")
    assert saved(chat, tmp_path / "chat")[0]["content"] == "first\nsecond"


def test_arrow_up_recalls_the_line_before_also_in_another_process(open_chat: Open, tmp_path: Path) -> None:
    first = open_chat()
    ask(first, "remember this")
    ask(first, UP)
    assert [m["content"] for m in saved(first, tmp_path / "first")[::2]] == ["remember this"] * 2
    first.type(CTRL_D)
    assert first.ends() == 0
    second = open_chat()
    ask(second, UP + UP)  # the line before the last: the last was /save
    assert saved(second, tmp_path / "second")[0]["content"] == "remember this"


def test_the_history_is_private(open_chat: Open, tmp_path: Path) -> None:
    ask(open_chat(), "a secret")
    history = tmp_path / "edge" / "chat_history"
    assert "a secret" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700


def test_ctrl_c_stops_the_answer_and_not_the_program(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat("--max-tokens", "8000", "--context", "8192")
    chat.enter("1")
    chat.sees("[a-z]{10}")
    chat.type(CTRL_C)
    shown = chat.sees(r"stopped  (\d+) tokens  " + STATS)
    assert "Traceback" not in shown
    chat.ready()
    messages = saved(chat, tmp_path / "chat")
    assert re.fullmatch("[a-z]+", messages[1]["content"])  # what was said so far is part of the conversation
    chat.type(CTRL_D)
    assert chat.ends() == 0


def test_ctrl_c_while_a_long_text_is_read_keeps_the_question(open_chat: Open, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("How many minutes are in 3 hours? " * 3000)  # a token at a time: read for minutes
    chat = open_chat("--file", long, "--batch", "1", "--context", "32768")
    chat.enter("first")
    for again in ("/edit", "/retry"):
        chat.sees("Reading the prompt")
        chat.type(CTRL_C)
        chat.sees(
            "stopped before the answer began; the question was removed from the conversation; /retry asks it again"
        )
        chat.ready()
        chat.enter(again)
        if again == "/edit":
            chat.sees("first")
            chat.enter(" and second")
    chat.sees("Reading the prompt")
    chat.type(CTRL_C)
    chat.ready()
    chat.type(UP)
    chat.sees("/retry")
    chat.type(UP)
    chat.sees("first and second")
    chat.type(CTRL_C)
    chat.ready()
    assert saved(chat, tmp_path / "chat") == []


def interrupted(*_: object, **__: object) -> Iterator[Response]:
    raise KeyboardInterrupt
    yield


def test_a_question_that_was_stopped_is_asked_as_it_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new one joins the conversation; one that was to replace the last exchange replaces it."""
    with load(ModelFile.open(MODEL_PATH), EngineOptions(context=512)) as engine:
        chat = Chat(engine)
        talk = conversation._Talk(LoadedChat(chat, 0.0, None), SamplingParams(temperature=0), 4, ())
        talk._answer("one")

        def stop(text: str | None, again: bool = False) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(conversation, "answer", interrupted)
                talk._answer(text, again=again)

        def questions() -> list[str]:
            return [message["content"] for message in chat.messages if message["role"] == "user"]

        stop("two")
        assert "removed from the conversation" in capsys.readouterr().out
        talk._edit("")
        assert (talk._draft, questions()) == ("two", ["one"])
        talk._retry("")
        assert questions() == ["one", "two"]
        stop("2", again=True)
        talk._retry("")
        assert questions() == ["one", "2"]
        stop(None, again=True)
        talk._edit("")
        assert talk._draft == "2"
        stop("three")
        talk._clear("")
        talk._draft = ""
        talk._edit("")
        assert talk._draft == ""
        assert "there is no question yet" in capsys.readouterr().out


def test_thought_that_is_shown_is_that_of_the_last_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with load(ModelFile.open(MODEL_PATH), EngineOptions(context=512)) as engine:
        chat = Chat(engine)
        talk = conversation._Talk(LoadedChat(chat, 0.0, None), SamplingParams(temperature=0), 4, ())
        talk._answer("one")
        chat.save(tmp_path / "chat")

        def stopped() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(conversation, "answer", interrupted)
                talk._answer("two")

        changes: dict[str, Callable[[], None]] = {
            "stopped": stopped,
            "answered": lambda: talk._answer("three"),
            "retried": lambda: talk._retry(""),
            "undone": lambda: talk._undo(""),
            "loaded": lambda: talk._load(str(tmp_path / "chat")),
            "cleared": lambda: talk._clear(""),
        }
        for name, change in changes.items():
            talk._thought = "what was thought before"
            talk._show_thought("")
            assert "what was thought before" in capsys.readouterr().out
            change()
            capsys.readouterr()
            talk._show_thought("")
            assert "the last answer has no thought" in capsys.readouterr().out, name


class Deployed:
    """A deployment on two devices, one of which fails when a test says so."""

    names = ("a", "b")

    def line(self) -> str:
        return "on a and b"


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        (["ok"], False),
        (["lost"], True),
        (["lost", "ok"], False),  # the model was loaded anew meanwhile
        (["ok", "lost", "/help"], True),
        (["lost", "ok", "lost"], True),
        (["lost", "stopped"], False),
    ],
)
def test_chat_ends_with_the_error_of_its_devices_only_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], lost: bool
) -> None:
    class Lines:
        def __init__(self, _: object) -> None:
            self.left = [*lines]

        def read(self, _: str) -> str:
            if not self.left:
                raise EOFError
            return self.left.pop(0)

    def answer(chat: Chat, text: str | None, *values: Any, **options: Any) -> Iterator[Response]:
        if text == "lost":
            raise WorkerError("device b is gone")
        return interrupted() if text == "stopped" else own_answer(chat, text, *values, **options)

    monkeypatch.setattr(conversation, "PromptLine", Lines)
    monkeypatch.setattr(conversation, "answer", answer)
    with load(ModelFile.open(MODEL_PATH), EngineOptions(context=512)) as engine:
        loaded = LoadedChat(Chat(engine), 0.0, Deployed())  # type: ignore[arg-type]
        talk = conversation._Talk(loaded, SamplingParams(temperature=0), 2, ())
        if lost:
            with pytest.raises(WorkerError, match="device b is gone"):
                talk.run()
        else:
            assert talk.run() == 0


def test_interrupts_in_a_row_do_not_end_the_program(open_chat: Open) -> None:
    chat = open_chat("--max-tokens", "8000", "--context", "8192")
    chat.enter("1")
    chat.sees("[a-z]{10}")
    for _ in range(3):
        os.kill(chat.process.pid, signal.SIGINT)
    chat.ready()
    chat.enter("/exit")
    assert chat.ends() == 0


def test_ctrl_c_at_the_prompt_empties_the_line(chat: Terminal, tmp_path: Path) -> None:
    chat.type("never mind" + CTRL_C)
    chat.ready()
    ask(chat, "one")
    assert saved(chat, tmp_path / "chat")[0]["content"] == "one"


def test_ctrl_d_leaves(open_chat: Open) -> None:
    chat = open_chat()
    chat.type(CTRL_D)
    assert chat.ends() == 0


def test_only_what_is_new_is_computed(chat: Terminal) -> None:
    ask(chat, "one")
    ask(chat, "two")
    chat.enter("/stats")
    shown = chat.sees(r"(\d+) tokens, (\d+) of them from the prefix cache")
    chat.ready()
    prompt, current = map(int, re.findall(r"(\d+) tokens, (\d+) of them", shown)[-1])
    assert 0 < current < prompt


def test_a_prompt_that_does_not_fit_is_said_and_forgotten(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat("--context", "64")
    chat.enter("word " * 60)
    chat.sees("which must also hold the answer")
    chat.ready()
    assert saved(chat, tmp_path / "chat") == []


def echoes(chat: Terminal) -> bool:
    """Return True if the terminal shows typed keys and passes whole lines on, as for a shell."""
    flags = chat.attributes()[3]
    return bool(flags & termios.ECHO and flags & termios.ICANON)


def test_keys_typed_during_an_answer_wait_for_the_prompt(open_chat: Open) -> None:
    chat = open_chat("--max-tokens", "300", "--context", "512")
    chat.enter("1")
    chat.sees("[a-z]{10}")
    assert not echoes(chat)
    chat.type("WAITING")
    assert "WAITING" not in chat.sees(STATS)
    chat.ready()
    chat.sees("WAITING")


def test_a_line_typed_during_an_answer_is_asked_next(open_chat: Open, tmp_path: Path) -> None:
    chat = open_chat("--max-tokens", "100", "--context", "512")
    chat.enter("1")
    chat.sees("[a-z]{10}")
    chat.enter("2")
    chat.sees(STATS)
    chat.sees(STATS)
    chat.ready()
    assert [m["content"] for m in saved(chat, tmp_path / "chat")][::2] == ["1", "2"]


def test_ctrl_c_during_the_first_paragraph_prints_it_once(open_chat: Open) -> None:
    chat = open_chat("--max-tokens", "8000", "--context", "8192")
    chat.enter("1")
    chat.sees("[a-z]{100}")
    chat.type(CTRL_C)
    assert "^C" not in chat.sees(STATS)  # an echoed ^C would move the cursor, and the paragraph would stay above


@pytest.mark.parametrize("ending", ["exit", "SIGTERM"])
def test_the_echo_is_back_after_the_chat(open_chat: Open, ending: str) -> None:
    chat = open_chat("--max-tokens", "8000", "--context", "8192")
    if ending == "exit":
        chat.enter("exit")
    else:
        chat.enter("1")
        chat.sees("[a-z]{10}")
        assert not echoes(chat)
        os.kill(chat.process.pid, signal.SIGTERM)
    assert chat.ends() == (0 if ending == "exit" else 143)
    assert echoes(chat)


def test_the_echo_is_back_while_an_answer_is_suspended(tmp_path: Path) -> None:
    words = 'set -m; "$@"; stty -a | grep -o " icanon .* echo "; fg'
    (tmp_path / "endless.gbnf").write_text(ENDLESS)
    options = ("--max-tokens", "8000", "--grammar", tmp_path / "endless.gbnf")
    shell = Terminal(*options, state=tmp_path, under=["sh", "-c", words, "sh"])
    shell.ready()
    shell.enter("1")
    shell.sees("[a-z]{10}")
    shell.type(CTRL_Z)
    shell.sees("icanon .* echo ")
    shell.sees("[a-z]{40}")  # the answer goes on; before, Ctrl-C would end the shell
    shell.type(CTRL_C)
    shell.sees(STATS)
    shell.ready()
    shell.close()


def test_aliases_of_commands(open_chat: Open) -> None:
    chat = open_chat()
    chat.enter("/?")
    chat.sees("/stats")
    chat.ready()
    chat.enter("exit")
    assert chat.ends() == 0


def test_a_resumed_conversation_shows_its_last_exchange(open_chat: Open, tmp_path: Path) -> None:
    first = open_chat("--resume", "garden")
    ask(first, "first 8127")
    ask(first, "second 5309")
    answer = saved(first, tmp_path / "chat")[-1]["content"]
    first.enter("exit")
    assert first.ends() == 0
    again = Terminal("--resume", "garden", state=tmp_path)
    shown = again.ready()
    _, _, exchange = shown.partition("lists commands")
    assert "8127" not in exchange
    assert "second 5309" in exchange
    assert answer in exchange
    again.close()


def test_the_header_names_the_model_as_it_was_typed(tmp_path: Path) -> None:
    chat = Terminal(MODEL_PATH, state=tmp_path)
    assert str(MODEL_PATH) in chat.ready()
    chat.close()
