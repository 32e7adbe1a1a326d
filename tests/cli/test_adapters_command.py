"""Test `--lora FILE[:SCALE]` of `edge chat`, `edge bench` and `edge serve`, and `/lora` in a conversation."""

import json
from pathlib import Path

import pytest

import edge
from apps.show.terminal import _use_adapter
from edge.models.demo import MODEL_PATH
from tests.support.adapters import write_adapter
from tests.support.helpers import assert_one_line_error, chat_json, edge_here, run_chat

QUESTION = ("-p", "What is 27 plus 38?", "--temperature", "0", "--seed", "1", "--max-tokens", "8")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("a") / "pirate.gguf", MODEL_PATH, size=0.3)


def test_an_answer_with_an_adapter(adapter: Path) -> None:
    """With its scale, several, and at 0 as without."""
    plain = chat_json(*QUESTION)["token_ids"]
    half, full = (chat_json(*QUESTION, "--lora", f"{adapter}:{scale}")["token_ids"] for scale in (0.5, 1))
    assert len({tuple(tokens) for tokens in (plain, half, full)}) == 3
    assert chat_json(*QUESTION, "--lora", str(adapter))["token_ids"] == full
    assert chat_json(*QUESTION, "--lora", f"{adapter}:0")["token_ids"] == plain
    other = write_adapter(adapter.with_name("other.gguf"), MODEL_PATH, size=0.3, seed=1)
    both = chat_json(*QUESTION, "--lora", f"{adapter}:0.5", "--lora", f"{other}:0.5")["token_ids"]
    assert both not in (plain, half)


def test_a_benchmark_counts_it(adapter: Path) -> None:
    how = (
        "--prompt-tokens",
        "8",
        "--gen-tokens",
        "2",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--memory",
        "3GiB",
        "--json",
    )
    plain, changed = (edge_here("bench", *how, *lora) for lora in ((), ("--lora", str(adapter))))
    parts = json.loads(changed.stdout)["memory"]["parts"]
    assert 0 < parts["adapters"] < adapter.stat().st_size
    assert "adapters" not in json.loads(plain.stdout)["memory"]["parts"]


def test_what_is_refused(adapter: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(60))
    for lora, code, words in (
        (tmp_path / "none.gguf", 3, "none.gguf: no such file"),
        (bad, 3, "bad.gguf"),
        (MODEL_PATH, 3, "general.type is"),
        (f"{adapter}:inf", 5, "the scale of"),
    ):
        assert_one_line_error(run_chat(*QUESTION, "--lora", str(lora)), code, words)
    twice = ("--lora", str(adapter), "--lora", f"{adapter}:0.5")
    assert_one_line_error(run_chat(*QUESTION, *twice), 5, "'pirate' is the name of two adapters or models")
    assert_one_line_error(run_chat("--url", "http://127.0.0.1:1", "-p", "Hi", *twice[:2]), 2, "--lora is about a model")
    two = tmp_path / "two.gguf"
    two.write_bytes(MODEL_PATH.read_bytes())
    served = edge_here("serve", str(MODEL_PATH), str(two), "--port", "0", "--lora", str(adapter))
    assert_one_line_error(served, 2, "--lora is of one model, and there are 2; name one")


def test_a_conversation_changes_it(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with edge.load(threads=1, lora=[f"{adapter}:0"]) as model:
        chat = edge.Chat(model)

        def answer() -> str:
            chat.clear()
            return "".join(
                response.text for response in chat.ask("Hi", edge.SamplingParams(temperature=0), max_tokens=6)
            )

        plain = answer()
        _use_adapter(chat, "pirate 1")
        assert answer() != plain
        _use_adapter(chat, "pirate many")
        _use_adapter(chat, "parrot 1")
        _use_adapter(chat, "pirate 1_0")
        _use_adapter(chat, "pirate 1e7")
        assert chat.adapters == {"pirate": 1.0}
        _use_adapter(chat, "pirate .5")  # as FILE:SCALE may have it
        assert chat.adapters == {"pirate": 0.5}
        _use_adapter(chat, "pirate 0")
        assert answer() == plain
    out = capsys.readouterr().out
    assert out.count("/lora NAME SCALE") == 3
    assert out.count("the scale of 'pirate' is 10000000.0") == 1
