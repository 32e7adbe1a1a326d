"""Conversations: what the model is shown, what is remembered, what is forgotten, what is saved."""

import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edge.errors import ChatFileError, ContextFull, EngineError, Interrupted, SamplingError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.model import Model
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from tests.conftest import OPTIONS, Synthetic
from tests.support.drafting import tokens_of
from tests.support.thinking import says

GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, grammar="root ::= [a-z] root")  # an answer of as many tokens as are asked for


def roles(chat: Chat) -> list[str]:
    return [message["role"] for message in chat.messages]


def test_each_turn_computes_only_what_is_new(demo: Engine) -> None:
    chat = Chat(demo)
    current = 0
    for question in ("My name is Ada.", "What is 3 plus 4?", "What is my name?"):
        last = list(chat.ask(question, GREEDY, max_tokens=8))[-1]
        assert last.usage.cached_tokens >= current
        assert last.usage.prompt_tokens - last.usage.cached_tokens < 30
        current = chat.context_used - 1
    assert roles(chat) == ["user", "assistant"] * 3


def test_a_model_that_was_closed_is_refused_in_words() -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        chat = Chat(engine)
    model = engine.model
    for use in (
        lambda: list(chat.ask("Hello", GREEDY)),
        lambda: Chat(engine),
        lambda: model.is_end(5),
        lambda: model.piece(5),
    ):
        with pytest.raises(EngineError, match=r"^the model is closed; load it again$"):
            use()
    for use_cache in (engine.kv_clear, lambda: engine.kv_remove(0, 1), lambda: engine.kv_last(0)):
        with pytest.raises(EngineError, match=r"^the engine is closed$"):
            use_cache()


def test_the_second_turn_is_what_a_fresh_conversation_would_answer(demo: Engine) -> None:
    chat = Chat(demo)
    list(chat.ask("My name is Ada.", GREEDY, max_tokens=8))
    messages = [dict(m) for m in chat.messages]
    answer = [r.token_id for r in chat.ask("What is my name?", GREEDY, max_tokens=8)]
    fresh = Chat(demo)
    fresh.messages = messages
    assert [r.token_id for r in fresh.ask("What is my name?", GREEDY, max_tokens=8)] == answer


def test_the_system_message_is_first_and_can_be_changed_and_removed(demo: Engine) -> None:
    chat = Chat(demo, system="Answer briefly.")
    without = Chat(demo)
    chat.messages.append({"role": "user", "content": "hi"})
    without.messages.append({"role": "user", "content": "hi"})
    assert chat.prompt_tokens() != without.prompt_tokens()
    chat.system = "Be long."
    assert chat.messages[0] == {"role": "system", "content": "Be long."}
    chat.clear()
    assert roles(chat) == ["system"]
    chat.system = None
    assert chat.messages == []


def test_the_oldest_exchanges_are_forgotten_when_the_context_is_full(demo: Engine) -> None:
    chat = Chat(demo, system="Answer briefly.")
    dropped = 0
    for i in range(20):
        list(chat.ask(f"What is {i} plus {i}? " + "Think well. " * 4, ENDLESS, max_tokens=8))
        dropped += chat.dropped
        assert chat.context_used <= demo.context
    assert dropped > 0
    assert chat.system == "Answer briefly."
    assert roles(chat)[1:3] == ["user", "assistant"]


def test_forgetting_makes_room_for_several_turns_at_once(demo: Engine) -> None:
    computed, dropped = forgetting(Chat(demo, when_full="forget"))
    assert sum(n > 40 for n in computed) <= 5  # all else computes only what is new
    assert max(computed) > 40
    assert max(dropped) == 0


def test_shifting_computes_only_what_is_new(demo: Engine) -> None:
    chat = Chat(demo)
    assert chat.when_full == "shift"
    computed, dropped = forgetting(chat)
    assert max(computed) <= 30
    assert 1 <= sum(n > 0 for n in dropped) <= 5
    assert max(dropped) > demo.context // 4


def forgetting(chat: Chat) -> tuple[list[int], list[int]]:
    """Tokens that a long conversation computed for each prompt after the first, and dropped in place."""
    usages = [list(chat.ask(f"What is {i} plus {i}?", ENDLESS, max_tokens=8))[-1].usage for i in range(24)]
    computed = [usage.prompt_tokens - usage.cached_tokens for usage in usages[1:]]
    return computed, [usage.dropped_tokens for usage in usages]


@pytest.fixture
def short() -> Iterator[Engine]:
    """The bundled model with a context that is soon full."""
    with Engine(MODEL_PATH, replace(OPTIONS, context=64)) as engine:
        yield engine


def test_a_full_context_ends_an_answer_unless_it_is_shifted(short: Engine) -> None:
    n_tokens = {}
    for choice in ("shift", "forget", "stop"):
        chat = Chat(short, system="Answer briefly.", when_full=choice)  # type: ignore[arg-type]
        last = list(chat.ask("What is 3 plus 4?", ENDLESS, max_tokens=160))[-1]
        assert last.finish_reason == "length"
        n_tokens[choice] = last.usage.completion_tokens
        assert (last.usage.dropped_tokens > 0) == (choice == "shift")
        assert len(chat.messages[-1]["content"]) >= n_tokens[choice]
        prompt = last.usage.prompt_tokens
    assert n_tokens == {"shift": 160, "forget": short.context - prompt + 1, "stop": short.context - prompt + 1}


def test_what_never_ends_is_ended_after_as_many_tokens_as_a_context_holds(short: Engine) -> None:
    last = list(Chat(short).ask("What is 3 plus 4?", ENDLESS))[-1]
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", short.context)
    assert last.usage.dropped_tokens > 0


def test_the_system_message_stays_when_an_answer_is_shifted(demo: Engine) -> None:
    chat = Chat(demo, system="Answer briefly.")
    answer = chat.ask("What is 3 plus 4?", ENDLESS, max_tokens=400)
    next(answer)
    prompt = tokens_of(chat._scheduler)
    *_, last = answer
    assert last.usage.dropped_tokens > 0
    current = tokens_of(chat._scheduler)
    assert current[: chat._beginning(prompt)] == prompt[: chat._beginning(prompt)]
    text = b"".join(map(demo.model.piece, current)).decode()
    assert "Answer briefly." in text
    assert "What is 3" not in text


def test_the_end_of_an_answer_longer_than_the_context_is_there_for_the_next_question(demo: Engine) -> None:
    chat = Chat(demo)
    story = demo.model.tokenize(" ".join(map(str, range(300))), add_special=False, parse_special=False)
    with says(story):  # a processor's rounding decides what the model would say
        list(chat.ask("Tell me a story.", GREEDY, max_tokens=400))
    current = tokens_of(chat._scheduler)
    last = list(chat.ask("How does it go on?", ENDLESS, max_tokens=8))[-1]
    assert last.usage.prompt_tokens - last.usage.cached_tokens <= 30
    assert last.usage.cached_tokens > demo.context // 4
    assert last.usage.dropped_tokens > 0
    assert tokens_of(chat._scheduler)[8:64] in (current[i : i + 56] for i in range(len(current)))
    list(chat.ask("And then?", ENDLESS, max_tokens=8))
    assert roles(chat) == ["user", "assistant"] * 2  # the long one is forgotten as others are


def test_stopping_forgets_nothing(demo: Engine) -> None:
    chat = Chat(demo, when_full="stop")
    list(chat.ask("What is 3 plus 4?", ENDLESS, max_tokens=600))
    before = list(chat.messages)
    with pytest.raises(ContextFull):
        list(chat.ask("What is 4 plus 5?", ENDLESS, max_tokens=8))
    assert chat.messages == before


def test_a_conversation_that_was_cleared_leaves_nothing_behind(demo: Engine) -> None:
    chat = Chat(demo)
    question = "What is my name, please, as I told you before? " * 3
    list(chat.ask("My name is Ada.", GREEDY, max_tokens=8))
    list(chat.ask(question, GREEDY, max_tokens=8))
    chat.clear()
    last = list(chat.ask(question, GREEDY, max_tokens=8))[-1]
    assert last.usage.dropped_tokens == 0
    assert last.usage.cached_tokens < 8  # not what was computed when the name was known


def test_a_model_that_cannot_shift_forgets(synthetic: Synthetic) -> None:
    template = "{{ messages[-1].content }}"
    with Engine(synthetic("gemma3"), OPTIONS) as engine:
        assert Chat(engine, template=template).when_full == "forget"
        with pytest.raises(EngineError, match=r"gemma3.* cannot shift its context.* use forget or stop"):
            Chat(engine, template=template, when_full="shift")
        with pytest.raises(ValueError, match="shift, forget, stop or None, not 'never'"):
            Chat(engine, when_full="never")  # type: ignore[arg-type]


def test_what_had_to_be_forgotten_comes_back_where_there_is_no_answer(demo: Engine) -> None:
    chat = Chat(demo)
    while chat.dropped == 0:
        before = [dict(m) for m in chat.messages]
        answer = chat.ask("What is 3 plus 4? " + "Think well. " * 4, ENDLESS, max_tokens=8)
        demo.stop()
        with pytest.raises(Interrupted):
            next(answer)
        demo.resume()
        assert chat.messages == before
        list(chat.ask("What is 3 plus 4? " + "Think well. " * 4, ENDLESS, max_tokens=8))


def test_a_message_that_leaves_no_room_for_others_is_answered_alone(demo: Engine) -> None:
    chat = Chat(demo)
    list(chat.ask("Hello!", ENDLESS, max_tokens=4))
    long = "What is 3 plus 4? " * 27
    last = list(chat.ask(long, ENDLESS, max_tokens=4))[-1]
    assert demo.context * 3 // 4 < last.usage.prompt_tokens < demo.context
    assert chat.dropped == 2
    assert chat.messages[0]["content"] == long


def test_a_message_longer_than_the_context_is_refused_and_not_remembered(demo: Engine) -> None:
    chat = Chat(demo)
    list(chat.ask("Hello!", ENDLESS, max_tokens=4))
    before = list(chat.messages)
    with pytest.raises(ContextFull):
        list(chat.ask("word " * 3000, GREEDY))
    assert chat.messages == before
    list(chat.ask("Hello again!", ENDLESS, max_tokens=4))
    assert chat.messages[: len(before)] == before


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(demo: Engine) -> None:
    chat = Chat(demo)
    answer = chat.ask("Hello!", ENDLESS, max_tokens=50)
    text = "".join(next(answer).text for _ in range(5))
    answer.close()  # type: ignore[attr-defined]
    assert chat.messages == [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": text}]


def test_the_last_question_is_answered_again_in_other_words_or_taken_back(demo: Engine) -> None:
    chat = Chat(demo, system="Answer briefly.")
    list(chat.ask("What is 2 plus 3?", GREEDY, max_tokens=8))
    first = list(chat.messages)
    list(chat.ask("What is 3 plus 4?", GREEDY, max_tokens=8))
    both = list(chat.messages)
    assert list(chat.retry(None, GREEDY, max_tokens=8))
    assert chat.messages == both  # the same question, the same answer
    list(chat.retry("What is 20 plus 30?", ENDLESS, max_tokens=8))
    assert chat.messages[:3] == first
    assert [m["content"] for m in chat.messages[3:]] == ["What is 20 plus 30?", chat.messages[4]["content"]]
    assert chat.messages[4] != both[4]
    assert chat.undo() == "What is 20 plus 30?"
    assert chat.messages == first
    assert (chat.undo(), chat.last_question, chat.undo()) == ("What is 2 plus 3?", None, None)
    assert roles(chat) == ["system"]
    with pytest.raises(ValueError, match="no question"):
        chat.retry()


def test_what_is_asked_again_and_not_answered_changes_nothing(demo: Engine) -> None:
    chat = Chat(demo)
    list(chat.ask("What is 2 plus 3?", GREEDY, max_tokens=8))
    before = list(chat.messages)
    with pytest.raises(ContextFull):
        list(chat.retry("word " * 2000, GREEDY))
    assert chat.messages == before


def test_saved_and_loaded_again(demo: Engine, tmp_path: Path) -> None:
    chat, file = Chat(demo, system="Answer briefly."), tmp_path / "chat.json"
    list(chat.ask("What is 3 plus 4?", GREEDY, max_tokens=8))
    chat.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["chat.json"]
    other = Chat(demo)
    other.load(file)
    assert other.messages == chat.messages


def test_bytes_that_are_no_text_are_saved_as_they_came(demo: Engine, tmp_path: Path) -> None:
    """A terminal or a command line passes them on as halves of surrogate pairs, which UTF-8 has no bytes for."""
    chat, file = Chat(demo, system="caf\udce9, \U0001f600"), tmp_path / "chat.json"
    chat.save(file)
    other = Chat(demo)
    other.load(file)
    assert other.messages == chat.messages


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"format": "edge-chat-1"}',
        '{"format": "edge-chat-1", "messages": [1]}',
        '{"format": "edge-chat-1", "messages": [{"role": "robot", "content": "x"}]}',
        '{"format": "edge-chat-1", "messages": [{"role": "user", "content": 3}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_not_a_saved_chat_changes_nothing(demo: Engine, tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    chat = Chat(demo, system="Answer briefly.")
    with pytest.raises(ChatFileError, match=r"chat\.json"):
        chat.load(file)
    assert chat.system == "Answer briefly."


def test_a_save_that_fails_leaves_no_half_file(demo: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat.json"
    Chat(demo, system="old").save(file)
    old = file.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full", ".chat.json.tmp")))
    with pytest.raises(OSError, match=r"^[^']*/chat\.json: cannot be saved: disk full$"):
        Chat(demo, system="new").save(file)
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == '["chat.json"]'
    assert file.read_text() == old


def test_a_saved_chat_is_replaced_and_nothing_else_is(demo: Engine, tmp_path: Path) -> None:
    chat, saved = Chat(demo, system="old"), tmp_path / "chat.json"
    chat.save(saved)
    chat.system = "new"
    chat.save(saved)
    assert "new" in saved.read_text()
    for name, content in (("id_rsa", b"a key"), ("empty", b""), ("data.json", b"{}"), ("weights", b"\xff\x00")):
        other = tmp_path / name
        other.write_bytes(content)
        other.chmod(0o640)
        with pytest.raises(ChatFileError, match=rf"{name} exists and is not a saved chat"):
            chat.save(other)
        assert (other.read_bytes(), stat.S_IMODE(other.stat().st_mode)) == (content, 0o640)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "link"):
        with pytest.raises(ChatFileError, match=rf"{name} exists"):
            chat.save(tmp_path / name)
    with pytest.raises(OSError, match="there is no folder"):
        chat.save(tmp_path / "none" / "chat.json")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["chat.json", "data.json", "empty", "folder", "id_rsa", "link", "weights"]


def test_two_conversations_on_one_model_take_turns(demo: Engine) -> None:
    first, second, alone = Chat(demo), Chat(demo), Chat(demo)
    list(first.ask("My name is Ada.", GREEDY, max_tokens=8))
    list(second.ask("My name is Bob.", GREEDY, max_tokens=8))
    messages = [dict(m) for m in first.messages]
    answer = [r.token_id for r in first.ask("What is my name?", GREEDY, max_tokens=8)]
    demo.kv_clear()
    alone.messages = messages
    assert [r.token_id for r in alone.ask("What is my name?", GREEDY, max_tokens=8)] == answer


def test_an_answer_that_another_conversation_interrupts_ends_with_an_error(demo: Engine) -> None:
    first, second = Chat(demo), Chat(demo)
    answer = first.ask("My name is Ada.", ENDLESS, max_tokens=8)
    next(answer)
    other = [r.token_id for r in second.ask("What is 3 plus 4?", GREEDY, max_tokens=8)]
    with pytest.raises(EngineError, match=r"used this model before .* Model\.stream"):
        next(answer)
    again = Chat(demo)
    assert [r.token_id for r in again.ask("What is 3 plus 4?", GREEDY, max_tokens=8)] == other


@pytest.mark.parametrize("n", [0, -1])
def test_an_answer_of_no_tokens_is_refused(demo: Engine, n: int) -> None:
    """And not taken for one without end."""
    model = Model(demo, demo.close)
    with pytest.raises(SamplingError, match=f"max_tokens is {n}: it must be 1 or more"):
        next(model.generate([5, 6, 7], max_tokens=n))
    with model.stream() as requests, pytest.raises(SamplingError, match=f"max_tokens is {n}"):
        requests.add([5, 6, 7], max_tokens=n)


def test_requests_and_conversations_take_turns(demo: Engine) -> None:
    model, chat = Model(demo, demo.close), Chat(demo)
    list(chat.ask("My name is Ada.", GREEDY, max_tokens=8))
    with model.stream() as requests:
        requests.add([5, 6, 7], ENDLESS, max_tokens=8)
        next(iter(requests))
        name = "".join(r.text for r in chat.ask("What is my name?", GREEDY))
        assert "Ada" in name
        with pytest.raises(EngineError, match="used this model"):
            list(requests)
