"""Test words that would overflow an ordinary stack: llama.cpp's tokenizers recurse for each character."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import ContextFull, EngineError
from edge.llama import deep_stack
from edge.llama.deep_stack import MOST_UNBROKEN, SHORT, check_unbroken, with_deep_stack
from edge.llama.llama import Model
from tests.support import ROOT
from tests.support.thorough import thorough
from tests.support.tiny_gguf import byte_level_vocabulary, model

PRES = ("gpt-4o", "tekken", "deepseek-v3", "exaone-moe")
MORE = ("llama4", "superbpe", "bloom", "youtu", "seed-coder", "tiny_aya", "llama-bpe", "gpt-2", "deepseek-llm", "afmoe")
WORDS = ("a", "A", " ", "\n", "!", "漢", "é", "a ")  # repeated, each is one word of some tokenizer


@contextmanager
def tokenizer(folder: Path, pre: str) -> Iterator[Model]:
    file = model()
    file.pairs = {key: value for key, value in file.pairs.items() if not key.startswith("tokenizer.")}
    file.pairs |= byte_level_vocabulary(pre)
    opened = Model(file.write(folder / "model.gguf"), vocabulary_only=True)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("pre", [*PRES, *thorough(*MORE)])
def test_a_word_of_any_kind_that_overflows_a_stack_becomes_its_tokens(tmp_path: Path, pre: str) -> None:
    with tokenizer(tmp_path, pre) as opened:
        for word in WORDS:
            text = word * 30_000
            tokens = opened.tokenize(text, add_special=False, parse_special=False)
            assert b"".join(map(opened.piece, tokens)) == text.encode(), word


def test_a_long_text_has_the_tokens_that_it_has_on_an_ordinary_stack(tmp_path: Path) -> None:
    text = "Baa aaaa, 123 Schafe!\n\tDéjà-vu 漢字 aaaaaaaaa  \n" * 100
    assert len(text) > SHORT
    for pre in PRES:
        with tokenizer(tmp_path, pre) as opened:
            expected = opened._tokenized(opened.vocab, text, True, True)
            assert opened.tokenize(text, add_special=True, parse_special=True) == expected


@pytest.mark.parametrize("word", ["a", " "])
def test_the_longest_word_is_tokenized_and_a_longer_one_refused(tmp_path: Path, word: str) -> None:
    with tokenizer(tmp_path, "gpt-4o") as opened:
        longest = word * (MOST_UNBROKEN // 2 - 1)
        assert opened.tokenize(longest, add_special=False, parse_special=False)
        for text in (word * MOST_UNBROKEN, "x y " * 1000 + word * (32 << 20)):
            with pytest.raises(ContextFull, match=r"more than 131072 characters without a break.* line breaks"):
                opened.tokenize(text, add_special=False, parse_special=False)


@given(st.lists(st.sampled_from(["a", "bb", " ", "\n", ",", "7"]), max_size=60), st.integers(2, 12))
def test_a_text_that_is_accepted_has_no_stretch_of_the_limit(parts: list[str], half: int) -> None:
    text, n = "".join(parts), 2 * half
    longest = max(map(len, text.split()), default=0)
    lacks = deep_stack._lacks(text, n, deep_stack._BREAKS[""])
    assert lacks if longest >= n else True
    assert not lacks if longest < half else True


@pytest.mark.parametrize(("pre", "char", "most"), [("superbpe", "7", 4096), ("jais-2", " ", 32768)])
def test_stretches_that_take_a_tokenizer_minutes_are_refused_by_it_alone(pre: str, char: str, most: int) -> None:
    check_unbroken("x1 y2, " * 10_000 + char * (most // 2 - 1), pre)
    with pytest.raises(ContextFull, match=f"of more than {most // 2} characters"):
        check_unbroken("a" + char * most, pre)
    check_unbroken("a" + char * most, "gpt-4o")


def test_rows_of_spaces_do_not_stop_the_tokenizer_that_drops_spaces(tmp_path: Path) -> None:
    with tokenizer(tmp_path, "whitespace") as opened:
        for text in ("a  b", "a \n\n\t b", "a\u3000\u3000b", " " * 5000, "\n" * 5000, "a" * 50_000):
            tokens = opened.tokenize(text, add_special=False, parse_special=False)
            assert b"".join(map(opened.piece, tokens)).decode() == "".join(text.split())


def test_prose_without_a_comma_is_one_word_of_the_tokenizer_that_joins_words_only() -> None:
    prose = "no comma " * (MOST_UNBROKEN // 9)
    check_unbroken(prose, "gpt-4o")
    with pytest.raises(ContextFull, match="without a break"):
        check_unbroken(prose + "no comma", "exaone-moe")


def test_errors_of_the_work_are_raised_where_it_is_waited_for_and_stacks_stay_as_they_were() -> None:
    before = threading.stack_size()

    def fail() -> None:
        raise EngineError("refused")

    with pytest.raises(EngineError, match="refused"):
        with_deep_stack(fail, 3000)
    assert with_deep_stack(threading.current_thread, 3000) is not threading.current_thread()
    assert threading.stack_size() == before


def test_without_room_for_a_stack_the_error_says_so() -> None:
    code = (
        "import resource\n"
        "from edge.errors import EngineError\n"
        "from edge.llama.deep_stack import with_deep_stack\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "try:\n"
        "    with_deep_stack(lambda: None, 200_000)\n"
        "except EngineError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "no room for a stack of 196 MiB" in done.stdout, done.stderr
