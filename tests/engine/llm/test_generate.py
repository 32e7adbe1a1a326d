"""Generation: counters that add up, text that is whole, answers that end where they should, prompts computed once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import ContextFull, EngineError, Interrupted, SamplingError
from edge.llm.continuation import Request, TextStream
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.sampler import SamplingParams
from tests.support.drafting import ids, one_slot, tokens_of

GREEDY = SamplingParams(temperature=0)
PROMPT = [5, 300, 17, 401, 88, 260, 33, 499]


def run(engine: Engine, sampling: SamplingParams = GREEDY, max_tokens: int = 12, **more: object) -> list[Response]:
    return list(generate(one_slot(engine), Request(PROMPT, max_tokens, sampling, **more)))  # type: ignore[arg-type]


def test_counters_add_up(llama: Engine) -> None:
    responses = run(llama)
    assert [r.finish_reason for r in responses] == [None] * 12 + ["length"]
    assert [r.usage.completion_tokens for r in responses] == [*range(1, 13), 12]
    last = responses[-1]
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (len(PROMPT), 0)
    assert last.timing.tpot_s > 0
    assert last.timing.decode_tokens_per_s == pytest.approx(1 / last.timing.tpot_s)
    assert last.timing.prefill_tokens_per_s > 0
    assert len(PROMPT) / last.timing.prefill_tokens_per_s < last.timing.ttft_s


def test_greedy_is_the_likeliest_token_each_time(llama: Engine) -> None:
    expected, tokens = [], list(PROMPT)
    for _ in range(5):
        llama.kv_clear()
        expected.append(int(llama.decode(tokens, 0).argmax()))
        tokens.append(expected[-1])
    llama.kv_clear()
    assert ids(run(llama, max_tokens=5)) == expected


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(llama: Engine) -> None:
    def sampled(seed: int) -> list[int]:
        return ids(run(llama, SamplingParams(temperature=1.5, top_k=0, min_p=0, top_p=1, seed=seed)))

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_each_filter_alone_can_narrow_the_choice_to_the_likeliest(llama: Engine, narrow: dict[str, float]) -> None:
    wide = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    hot = SamplingParams(temperature=2.0, seed=3, **wide)  # type: ignore[arg-type]
    assert ids(run(llama, hot)) != ids(run(llama))
    assert ids(run(llama, SamplingParams(temperature=2.0, seed=3, **(wide | narrow)))) == ids(run(llama))  # type: ignore[arg-type]


def test_a_repetition_penalty_ends_repetition(llama: Engine) -> None:
    grammar = "root ::= [a-z] root"
    plain = ids(run(llama, SamplingParams(temperature=0, grammar=grammar), max_tokens=20))
    penalised = ids(run(llama, SamplingParams(temperature=0, grammar=grammar, repeat_penalty=9.0), max_tokens=20))
    assert len(set(penalised)) > len(set(plain))


def test_generation_ends_when_the_context_is_full(llama: Engine) -> None:
    endless = SamplingParams(temperature=0, grammar="root ::= [a-z] root")
    responses = list(generate(one_slot(llama), Request(PROMPT, None, endless)))
    assert responses[-1].finish_reason == "length"
    assert len(PROMPT) + len(ids(responses)) == llama.context + 1  # the last token needs no room


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(llama: Engine) -> None:
    with pytest.raises(ContextFull, match=r"300 tokens and the context 256"):
        next(generate(one_slot(llama), Request([5] * 300, None, GREEDY)))
    with pytest.raises(ContextFull, match="empty"):
        next(generate(one_slot(llama), Request([], None, GREEDY)))


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(llama: Engine) -> None:
    text = "".join(r.text for r in run(llama))
    stop = text[6:9]
    stopped = run(llama, stop=[stop])
    assert stopped[-1].finish_reason == "stop"
    assert "".join(r.text for r in stopped) == text[: text.index(stop)]
    with pytest.raises(SamplingError, match="empty"):
        run(llama, stop=[""])


def test_only_the_new_part_of_a_prompt_is_computed(llama: Engine) -> None:
    session = one_slot(llama)
    first = list(generate(session, Request(PROMPT, 4, GREEDY)))
    longer = [*tokens_of(session), 9, 10]
    second = list(generate(session, Request(longer, 4, GREEDY)))
    assert second[-1].usage.cached_tokens == len(PROMPT) + len(ids(first)) - 1  # the last token was never fed back
    changed = [*PROMPT[:3], 77, *PROMPT[4:]]
    third = list(generate(session, Request(changed, 4, GREEDY)))
    assert third[-1].usage.cached_tokens == 3
    for prompt, cached in ((longer, second), (changed, third)):
        assert ids(cached) == ids(list(generate(one_slot(llama), Request(prompt, 4, GREEDY))))
        llama.kv_clear()


def test_an_identical_prompt_computes_one_token(llama: Engine) -> None:
    session = one_slot(llama)
    first = list(generate(session, Request(PROMPT, 1, GREEDY)))
    again = list(generate(session, Request(PROMPT, 1, GREEDY)))
    assert again[-1].usage.cached_tokens == len(PROMPT) - 1
    assert ids(again) == ids(first)


def test_prefill_progress_counts_chunks(llama: Engine) -> None:
    seen: list[tuple[int, int]] = []
    list(generate(one_slot(llama), Request([5] * 70, 1, GREEDY, on_prefill=lambda *a: seen.append(a))))
    assert seen == [(0, 70), (32, 70), (64, 70), (70, 70)]


@pytest.mark.parametrize(
    "error", [Interrupted("x"), KeyboardInterrupt(), EngineError("x")], ids=lambda e: type(e).__name__
)
def test_after_a_failed_decode_the_session_still_gives_the_right_answer(
    llama: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    expected = ids(list(generate(one_slot(llama), Request(PROMPT, 6, GREEDY))))
    session, decode, calls = one_slot(llama), llama.decode_rows, 0

    def failing(*args: object) -> None:
        nonlocal calls
        calls += 1
        decode(*args)  # type: ignore[arg-type]
        if calls == 4:
            raise error

    monkeypatch.setattr(llama, "decode_rows", failing)
    with pytest.raises(type(error)):
        list(generate(session, Request(PROMPT, 6, GREEDY)))
    assert ids(list(generate(session, Request(PROMPT, 6, GREEDY)))) == expected


def test_a_grammar_is_obeyed_even_against_the_model(llama: Engine) -> None:
    grammar = 'root ::= "[" ("a" | "b") "," [0-9] [0-9] "]"'
    for temperature in (0.0, 1.5):
        responses = run(llama, SamplingParams(temperature=temperature, grammar=grammar, seed=1), max_tokens=30)
        text = "".join(r.text for r in responses)
        assert responses[-1].finish_reason == "stop"
        assert text[:3] in ("[a,", "[b,")
        assert text[3:5].isdigit()
        assert text[5:] == "]"


def test_a_json_schema_is_obeyed(demo: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"ready": {"type": "boolean"}, "name": {"enum": ["pi", "phone"]}},
        "required": ["ready", "name"],
        "additionalProperties": False,
    }
    responses = run(demo, SamplingParams(temperature=0, json_schema=json.dumps(schema)), max_tokens=100)
    answer = json.loads("".join(r.text for r in responses))
    assert isinstance(answer["ready"], bool)
    assert answer["name"] in ("pi", "phone")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be from 0 to 10000.0, got -1"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, got 1.5"),
    ],
)
def test_ranges_are_told_as_people_say_them(options: dict[str, float], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": "root ::= ["}, "not a valid GBNF grammar"),
        ({"grammar": 'other ::= "a"'}, "not a valid GBNF grammar with a rule 'root'"),
        ({"grammar": "root ::= " + "(" * 100_000}, "nests more than 500"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object"),
        ({"json_schema": '{"$ref": "https://example.com/schema"}'}, "cannot be used"),
    ],
)
def test_constraints_that_cannot_be_used_are_refused(llama: Engine, options: dict[str, str], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        run(llama, SamplingParams(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"seed": 2**32},
        {"repeat_penalty": 0.0},
        {"grammar": "x", "json_schema": "{}"},
    ],
    ids=str,
)
def test_sampling_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SamplingError):
        SamplingParams(**options)  # type: ignore[arg-type]


@given(text=st.text(max_size=60), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3), data=st.data())
def test_a_text_stream_is_the_text_up_to_the_first_stop_string(text: str, stop: list[str], data: st.DataObject) -> None:
    raw = text.encode("utf-8", errors="replace")
    text = raw.decode()
    stream, out, rest = TextStream(stop), "", raw
    while rest and not stream.stopped:
        n = data.draw(st.integers(1, len(rest)))
        out += stream.push(rest[:n])
        rest = rest[n:]
    out += stream.rest()
    if not stream.stopped:
        assert out == text
        assert not any(s in text for s in stop)
    else:  # later pieces may bring an earlier beginning of another stop string, never a later end
        assert text.startswith(out)
        assert any(text[len(out) :].startswith(s) for s in stop)
        assert not any(s in out for s in stop)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4))
def test_the_earliest_of_several_stop_strings_ends_a_text(text: str, stop: list[str]) -> None:
    stream = TextStream(stop)
    out = stream.push(text.encode()) + stream.rest()
    assert out == text[: min([at for s in stop if (at := text.find(s)) >= 0], default=len(text))]
    assert (stream.stopped is None) == (out == text)
    assert stream.stopped is None or text[len(out) :].startswith(stream.stopped)


def test_bytes_that_are_no_character_become_the_replacement_character() -> None:
    stream = TextStream([])
    assert stream.push(b"a\xe2\x82") == "a"
    assert stream.push(b"\xac") == "€"
    assert stream.push(b"\xe2") + stream.rest() == "�"
