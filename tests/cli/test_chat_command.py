"""`edge chat` without a terminal: answers, what each option does, and being stopped."""

import json
import re
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.cli import build_parser
from apps.engine_options import engine_options
from edge.llama import llama
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.text.repetition import Repetition
from edge.weights import memory
from quant.types import cache_type
from tests.conftest import Synthetic
from tests.support.helpers import (
    EDGE,
    ENDLESS,
    ROOT,
    TIMEOUT_S,
    assert_one_line_error,
    chat_json,
    run_chat,
    run_edge,
    start_edge,
    without_progress,
)
from tests.support.repetition import first_loop

KEYS = {
    "text": str,
    "thought": str,
    "token_ids": list,
    "finish_reason": str,
    "repetition": type(None),
    "usage": {
        "prompt_tokens": int,
        "cached_tokens": int,
        "completion_tokens": int,
        "restored_tokens": int,
        "dropped_tokens": int,
        "thought_tokens": int,
    },
    "timing": {
        "load_s": float,
        "ttft_s": float,
        "tpot_s": float,
        "prefill_tokens_per_s": float,
        "decode_tokens_per_s": float,
    },
    "speculation": {
        "draft": str,
        "draft_worker": type(None),
        "draft_worker_lost": bool,
        "drafted": int,
        "accepted": int,
        "passes": int,
        "rows_per_pass": float,
        "gain": float,
    },
    "seed": int,
    "memory": type(None),
    "gpu_layers": type(None),
    "paging": type(None),
}
GREEDY = ("--temperature", "0")
WILD = ("--temperature", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0")  # almost any token, any model


@pytest.fixture
def long(tmp_path: Path) -> tuple[str | Path, ...]:
    """Options under which every answer has 12 tokens."""
    return ("-p", "hi", "--grammar", written(tmp_path / "endless.gbnf", ENDLESS), "--max-tokens", "12")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def types_of(value: Any) -> Any:
    """A JSON value with its leaves replaced by their types."""
    return {k: types_of(v) for k, v in value.items()} if isinstance(value, dict) else type(value)


def parsed(*args: str) -> EngineOptions:
    """The engine options of a command line."""
    return engine_options(build_parser().parse_args(["chat", "--threads", "1", *args]))


# Answering once.


def test_a_prompt_by_option_by_dash_and_by_pipe_gets_the_same_answer() -> None:
    request = (*GREEDY, "--max-tokens", "4")
    by_option = run_edge("chat", "--threads", "1", "-p", "What is 2 plus 3?", *request)
    by_dash = run_chat("-p", "-", *request, stdin="What is 2 plus 3?")
    by_pipe = run_edge("chat", "--threads", "1", *request, stdin="What is 2 plus 3?")
    joined = run_chat("-p", "plus 3?", *request, stdin="What is 2\n")  # the piped text first, then the question
    assert by_option.returncode == by_dash.returncode == by_pipe.returncode == 0
    assert by_option.stdout == by_dash.stdout == by_pipe.stdout == joined.stdout
    assert by_option.stdout.endswith("\n")


def test_without_a_terminal_there_are_no_colours_and_no_bars(long: tuple[str, ...]) -> None:
    done = run_chat(*long, "-p", "**bold** " * 50)
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr


def test_json_is_one_object_with_the_documented_keys(long: tuple[str, ...]) -> None:
    result = chat_json(*long)
    assert types_of(result) == KEYS
    assert result["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) == 12
    assert result["usage"]["prompt_tokens"] > 0
    assert all(value > 0 for value in result["timing"].values())


def test_the_tokens_in_json_spell_its_text(long: tuple[str, ...]) -> None:
    result = chat_json(*long)
    model = llama.Model(MODEL_PATH)
    assert b"".join(model.piece(token) for token in result["token_ids"]).decode() == result["text"]
    model.close()


def test_json_holds_the_text_that_is_printed_without_it(long: tuple[str, ...]) -> None:
    assert chat_json(*long, *GREEDY)["text"] + "\n" == run_chat(*long, *GREEDY).stdout


def test_temperature_zero_gives_identical_tokens_twice() -> None:
    request = ("-p", "What is 27 plus 38?", *GREEDY, "--max-tokens", "32")
    assert chat_json(*request)["token_ids"] == chat_json(*request)["token_ids"]


# What each option does.


def test_model_is_the_file_that_answers(synthetic: Synthetic) -> None:
    request = ("-p", "hi", "--max-tokens", "1")
    assert chat_json(synthetic("llama"), *request)["usage"] != chat_json(*request)["usage"]


def test_a_question_that_waits_for_piped_text_says_so() -> None:
    process = subprocess.Popen(
        [*EDGE, "chat", "--threads", "1", *GREEDY, "-p", "plus 3?"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None
    assert b"waiting for text on standard input" in process.stderr.readline()  # while nothing comes, and none ends
    out, _ = process.communicate(b"What is 2", timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, run_chat("-p", "What is 2\n\nplus 3?", *GREEDY).stdout.encode())


def test_draft_says_how_tokens_are_drafted(synthetic: Synthetic, long: tuple[str, ...]) -> None:
    """A seed turns it off, unless it is given, too: one who wants the same answer wants the same rounding."""
    request = (*long, *GREEDY)
    by_model = chat_json(*request, "--draft", MODEL_PATH)
    assert by_model["speculation"]["draft"] == MODEL_PATH.name
    for more in (("--draft", "off"), ("--seed", "3")):
        assert chat_json(*request, *more)["speculation"] is None
    for more in ((), ("--seed", "3", "--draft", "ngram")):  # type: ignore[assignment]
        result = chat_json(*request, *more)
        assert result["speculation"]["draft"] == "ngram"
        assert result["text"] == by_model["text"]
    refused = run_chat(*long, "--draft", synthetic("llama"))
    assert_one_line_error(refused, 5, "its tokens differ")
    assert_one_line_error(run_chat(*long, "--draft", "no-such.gguf"), 3, "no such file")


def test_a_model_drafts_for_itself(long: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fewer bits, which are made once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = chat_json(*long, "--draft", "self")["speculation"]["draft"]
    (built,) = (tmp_path / "edge" / "types").glob("*.gguf")
    assert built.name == name
    assert built.stat().st_size < 0.9 * MODEL_PATH.stat().st_size


def test_a_model_that_drafts_is_a_part_of_the_budget(long: tuple[str, ...]) -> None:
    budget = ("--memory", "400MiB", "--context", "512", "--draft")
    run = partial(run_edge, "chat", "--threads", "1")  # a process of its own: what this one holds counts, too
    by_model, by_text = (chat_json(*long, *budget, how, run=run)["memory"] for how in (MODEL_PATH, "ngram"))
    assert by_model["parts"]["draft model"] > MODEL_PATH.stat().st_size
    assert "draft model" not in by_text["parts"]


def test_system_joins_the_prompt() -> None:
    request = ("-p", "hi", "--max-tokens", "1")
    with_system = chat_json(*request, "--system", "Answer briefly.")
    assert with_system["usage"]["prompt_tokens"] > chat_json(*request)["usage"]["prompt_tokens"]


def test_chat_template_replaces_the_one_of_the_model(tmp_path: Path) -> None:
    template = written(tmp_path / "template.jinja", "{{ messages[0].content }}")
    request = ("-p", "hi", "--max-tokens", "1")
    bare = chat_json(*request, "--chat-template", template)
    assert bare["usage"]["prompt_tokens"] < chat_json(*request)["usage"]["prompt_tokens"]


def test_max_tokens_ends_the_answer(long: tuple[str, ...]) -> None:
    result = chat_json(*long, "--max-tokens", "3")
    assert (len(result["token_ids"]), result["finish_reason"]) == (3, "length")


@pytest.mark.parametrize(("stops", "text"), [(["c"], "ab"), (["x", "b"], "a"), (["ca"], "ab")])
def test_stop_ends_the_answer_and_is_not_part_of_it(tmp_path: Path, stops: list[str], text: str) -> None:
    letters = written(tmp_path / "letters.gbnf", 'root ::= "abc" root')
    options = [word for stop in stops for word in ("--stop", stop)]
    result = chat_json("-p", "hi", "--grammar", letters, "--max-tokens", "40", *options)
    assert (result["text"], result["finish_reason"]) == (text, "stop")


def test_temperature_makes_answers_differ(long: tuple[str, ...]) -> None:
    assert chat_json(*long, *WILD, "--seed", "1")["token_ids"] != chat_json(*long, *GREEDY)["token_ids"]


@pytest.mark.parametrize("option", [("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1")])
def test_each_filter_at_its_strictest_leaves_the_likeliest_token(long: tuple[str, ...], option: tuple[str]) -> None:
    assert chat_json(*long, *WILD, *option)["token_ids"] == chat_json(*long, *GREEDY)["token_ids"]


def test_repeat_penalty_changes_what_is_said(tmp_path: Path) -> None:
    letters = written(tmp_path / "letters.gbnf", "root ::= [a-h] root")
    request = ("-p", "hi", *WILD, "--seed", "1", "--grammar", letters, "--max-tokens", "32")
    assert chat_json(*request)["token_ids"] != chat_json(*request, "--repeat-penalty", "100")["token_ids"]


def test_same_seed_same_answer_and_another_seed_another(long: tuple[str, ...]) -> None:
    first, again, other = (chat_json(*long, *WILD, "--seed", seed) for seed in ("7", "7", "8"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert (first["seed"], other["seed"]) == (7, 8)


def test_the_seed_in_json_gives_the_same_answer_again(long: tuple[str, ...]) -> None:
    first = chat_json(*long, *WILD)
    assert chat_json(*long, *WILD, "--seed", str(first["seed"]))["token_ids"] == first["token_ids"]


def test_the_largest_seed_is_a_seed_like_any_other(long: tuple[str, ...]) -> None:
    first, again = (chat_json(*long, *WILD, "--seed", str(2**32 - 2)) for _ in range(2))
    assert first["token_ids"] == again["token_ids"]


def test_grammar_constrains_the_answer(tmp_path: Path) -> None:
    grammar = written(tmp_path / "grammar.gbnf", 'root ::= "yes" | "no"')
    assert chat_json("-p", "hi", "--grammar", grammar)["text"] in ("yes", "no")


def test_json_schema_constrains_the_answer(tmp_path: Path) -> None:
    schema = written(tmp_path / "schema.json", json.dumps({"enum": ["red", {"green": 1}]}))
    assert json.loads(chat_json("-p", "hi", "--json-schema", schema)["text"]) in ("red", {"green": 1})


def test_context_is_where_the_answer_ends_at_the_latest(long: tuple[str, ...]) -> None:
    result = chat_json(*long, "--max-tokens", "1000", "--context", "64", "--when-full", "stop")
    assert result["finish_reason"] == "length"
    assert result["usage"]["dropped_tokens"] == 0
    assert 63 <= result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"] <= 65


def test_one_answer_ends_where_the_context_is_full_and_says_so(tmp_path: Path) -> None:
    request = ("-p", "hi", "--grammar", written(tmp_path / "endless.gbnf", ENDLESS), *GREEDY, "--context", "64")
    result = chat_json(*request)
    assert (result["finish_reason"], result["usage"]["dropped_tokens"]) == ("length", 0)
    assert result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"] == 65  # the last needs no room
    said = "edge chat: the answer ends here: the context is full; --context N makes it larger"
    assert run_chat(*request).stderr == f"{said}; the text does not complete the grammar\n"
    assert run_chat(*request, "--max-tokens", "4").stderr == ""


def test_an_answer_that_repeats_itself_is_ended_and_says_so(tmp_path: Path) -> None:
    request = ("-p", "hi", *GREEDY, "--grammar", written(tmp_path / "loop.gbnf", 'root ::= "abcd, " root'))
    request += ("--context", "600")  # type: ignore[assignment]
    result = chat_json(*request)
    loop = result["repetition"]
    assert result["finish_reason"] == "repetition"
    assert first_loop(result["token_ids"]) == (len(result["token_ids"]), Repetition(**loop))
    done = run_chat(*request)
    assert done.stdout == result["text"] + "\n"
    said = f"the answer repeats the same {loop['period']} tokens, {loop['times']} times so far; the answer ends here"
    assert f"{said}, --allow-repetition lets it continue" in done.stderr
    assert done.stderr.endswith("; the text does not complete the grammar\n")
    on = chat_json(*request, "--allow-repetition", "--max-tokens", str(len(result["token_ids"]) + 8))
    assert (on["finish_reason"], on["repetition"]) == ("length", None)


def test_arrays_without_a_bound_get_one_that_is_said(tmp_path: Path) -> None:
    never = {"type": "array", "items": {"enum": ["yes"]}, "minItems": 1}
    request = ("-p", "hi", *GREEDY, "--max-tokens", "4")
    done = run_chat(*request, "--json-schema", written(tmp_path / "schema.json", json.dumps(never)))
    assert done.stderr.startswith("edge chat: --json-schema: # is an array without maxItems: 128 items at most")
    bounded = written(tmp_path / "bounded.json", json.dumps({**never, "maxItems": 2}))
    assert run_chat(*request, "--json-schema", bounded).stderr == ""


@pytest.mark.parametrize(
    "option",
    [
        ("--typical-p", "0.1"),
        ("--xtc-probability", "1", "--xtc-threshold", "0.01"),
    ],
    ids=lambda option: option[0],
)
def test_each_sampler_changes_what_is_said(option: tuple[str, ...]) -> None:
    request = ("-p", "Tell me of a city, and of a city.", *WILD, "--seed", "1", "--max-tokens", "32")
    assert chat_json(*request)["token_ids"] != chat_json(*request, *option)["token_ids"]


def test_dry_and_each_of_its_options_change_what_is_said(tmp_path: Path) -> None:
    letters = written(tmp_path / "letters.gbnf", "root ::= [a-d] root")
    request = ("-p", "hi", *GREEDY, "--max-tokens", "48", "--grammar", letters)
    assert chat_json(*request)["token_ids"] != chat_json(*request, "--dry-multiplier", "0.5")["token_ids"]
    request += ("--dry-multiplier", "0.5")  # type: ignore[assignment]
    plain = chat_json(*request)["token_ids"]
    for option in (
        ("--dry-base", "50"),
        ("--dry-allowed-length", "20"),
        ("--dry-penalty-last-n", "0"),
        ("--dry-sequence-breaker", "a"),
    ):
        assert chat_json(*request, *option)["token_ids"] != plain, option


def test_a_full_context_is_shifted_where_that_is_asked_for(long: tuple[str, ...]) -> None:
    request = (*long, *GREEDY, "--max-tokens", "200", "--context", "64", "--when-full", "shift")
    result = chat_json(*request)
    assert result["usage"]["completion_tokens"] == 200
    assert result["usage"]["dropped_tokens"] > 100
    done = run_chat(*request)
    assert done.stdout == result["text"] + "\n"
    assert (
        done.stderr == f"edge chat: context full: the oldest {result['usage']['dropped_tokens']} tokens were dropped\n"
    )


def test_a_model_with_windows_is_not_shifted(synthetic: Synthetic, tmp_path: Path, long: tuple[str, ...]) -> None:
    template = written(tmp_path / "template.jinja", "{{ messages[0].content }}")
    request = (synthetic("gemma3"), *long, "--chat-template", template, "--max-tokens", "100", "--context", "64")
    assert chat_json(*request)["usage"]["completion_tokens"] < 65
    assert_one_line_error(
        run_chat(*request, "--when-full", "shift"), 5, "cannot shift its context", "use forget or stop"
    )


def test_threads_batch_and_context_reach_the_engine() -> None:
    with Engine(MODEL_PATH, parsed("--context", "64", "--batch", "8")) as engine:
        assert (engine.threads, engine.batch, engine.context) == (1, 8, 64)


def test_threads_are_one_per_physical_core_where_the_model_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.llm.engine.default_threads", lambda: 3)
    unsaid = engine_options(build_parser().parse_args(["chat", "--context", "64"]))
    for worth, threads in ((1, 1), (2, 2), (9, 3)):
        monkeypatch.setattr("edge.llm.engine.worth_threads", lambda *_, worth=worth: worth)
        with Engine(MODEL_PATH, unsaid) as engine:
            assert engine.threads == threads


def test_gpu_layers_need_a_gpu() -> None:
    done = run_chat("-p", "hi", "--max-tokens", "1", "--gpu-layers", "1")
    if llama.has_gpu():
        assert done.returncode == 0
    else:
        assert_one_line_error(done, 5, "GPU")
    assert run_chat("-p", "hi", "--max-tokens", "1", "--gpu-layers", "0").returncode == 0


def test_kv_type_sets_the_size_of_the_cache() -> None:
    sizes = {
        kv: memory.need(MODEL_PATH, llama.ContextSizes(1024, cache_type(parsed("--kv-type", kv).kv_type))).parts[
            "KV cache"
        ]
        for kv in ("f32", "f16", "q8_0")
    }
    assert sizes["f32"] == 2 * sizes["f16"]
    assert sizes["q8_0"] == pytest.approx(sizes["f16"] * 34 / 64, rel=0.01)  # blocks of 32 values in 34 bytes
    assert run_chat("-p", "hi", "--max-tokens", "2", "--kv-type", "q8_0").returncode == 0


def test_an_attention_window_lets_an_answer_outgrow_the_context(tmp_path: Path) -> None:
    endless = ("-p", "hi", "--grammar", written(tmp_path / "endless.gbnf", ENDLESS), "--context", "68", *GREEDY)
    assert chat_json(*endless)["usage"]["completion_tokens"] < 68
    done = chat_json(*endless, "--attention-window", "64", "--max-tokens", "90", "--allow-repetition")
    assert done["usage"]["completion_tokens"] == 90
    assert done["usage"]["dropped_tokens"] > 0
    assert_one_line_error(run_chat("-p", "hi", "--attention-window", "65", "--context", "68"), 5, "context of 69")
    assert_one_line_error(run_chat("-p", "hi", "--attention-window", "9"), 2, "--attention-window")
    assert_one_line_error(run_chat("-p", "hi", "--attention-window", "64", "--when-full", "forget"), 5, "forget")


def test_flash_attention_off_cannot_have_a_quantized_cache() -> None:
    request = ("-p", "hi", "--max-tokens", "2", "--kv-type", "q8_0", "--flash-attention")
    assert run_chat(*request, "on").returncode == 0
    assert_one_line_error(run_chat(*request, "off"), 5, "flash")


def test_flash_attention_changes_how_sums_are_rounded() -> None:
    logits = []
    for choice in ("on", "off"):
        with Engine(MODEL_PATH, parsed("--flash-attention", choice)) as engine:
            logits.append(engine.decode(range(32), 0).copy())
    assert np.any(logits[0] != logits[1])
    assert np.allclose(logits[0], logits[1], atol=0.1 * float(logits[0].std()))


@pytest.mark.parametrize(("option", "repacked"), [("--repack", True), ("--no-repack", False)])
def test_repack_gives_weights_a_buffer_of_their_own(synthetic: Synthetic, option: str, repacked: bool) -> None:
    if "REPACK = 1" not in llama.system_info():
        pytest.skip("this build of llama.cpp does not repack")
    with llama.captured_log() as lines, Engine(synthetic("llama", "q4_0"), parsed(option)):
        assert any("CPU_REPACK model buffer" in line for line in lines) == repacked


# Being stopped.


def test_an_interrupt_ends_a_long_answer_and_keeps_what_was_said(long: tuple[str, ...]) -> None:
    process = start_edge("chat", "--threads", "1", *long, "--max-tokens", "8000", "--context", "8192")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, complaints = process.communicate(timeout=TIMEOUT_S)
    assert len(first + rest) < 8000  # not all the tokens that it may have
    assert process.returncode == 130
    assert re.fullmatch(rb"[a-z]+\s?", first + rest)
    assert b"Traceback" not in complaints


def test_a_reader_that_leaves_ends_the_answer(long: tuple[str, ...]) -> None:
    process = start_edge("chat", "--threads", "1", *long, "--max-tokens", "8000", "--context", "8192")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=TIMEOUT_S) == 141
    assert without_progress(process.stderr.read().decode()) == (
        "edge chat: --context 8192: the model was trained for 1024 tokens; with longer contexts answers get worse\n"
    )
    process.stderr.close()
