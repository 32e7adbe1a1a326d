"""Test fill-in-the-middle: layout and truncation of prompts, and answers of /infill and of `suffix`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.errors import ContextFull, SamplingError
from edge.llama.llama import Model
from edge.llm.options import EngineOptions
from edge.serve.app import create_app
from edge.serve.engine.infill import InfillPrompts
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import events_of, serving
from tests.support.fim import BOS, MID, PRE, REP, SEP, SUF, USER_DEFINED, fim_model, text
from tests.support.workers import worker

FILES = [{"filename": "a.py", "text": "A=1"}, {"filename": "b.py", "text": "B=2"}]
HEAD = [REP, *text("myproject\n")]
OWN = [SEP, *text("filename\n")]
ROOM = 1000


@contextmanager
def prompts(path: Path, *, spm: bool = False) -> Iterator[InfillPrompts]:
    model = Model(path, vocabulary_only=True)
    try:
        yield InfillPrompts(model, path.name, spm=spm)
    finally:
        model.close()


def gap(prefix: Any = "ab", suffix: str = "yz", line: str = "", files: Any = None) -> dict[str, Any]:
    return {"prefix": prefix, "suffix": suffix, "line": line, "files": files}


def test_layouts(tmp_path: Path) -> None:
    around = [PRE, *text("ab"), SUF, *text("yz"), MID]
    with prompts(fim_model(tmp_path / "all.gguf")) as layout:
        assert layout.tokens(gap(), ROOM) == [BOS, *around]
        assert layout.tokens(gap("a", line="b"), ROOM) == [BOS, *around]
        assert layout.tokens(gap(text("ab")), ROOM) == [BOS, *around]
        assert layout.tokens(gap("", ""), ROOM) == [BOS, PRE, SUF, MID]
        assert layout.tokens(gap(files=[]), ROOM) == [BOS, *HEAD, *OWN, *around]
        first, second = ([SEP, *text(f"{file['filename']}\n{file['text']}")] for file in FILES)
        assert layout.tokens(gap(files=FILES), ROOM) == [BOS, *HEAD, *first, *second, *OWN, *around]
    with prompts(fim_model(tmp_path / "spm.gguf", 3), spm=True) as layout:
        assert layout.tokens(gap(line="c"), ROOM) == [BOS, SUF, *text("yz"), PRE, *text("abc"), MID]
        between = text("\n\n--- snippet ---\n\n")
        expected = [BOS, *between, *text("A=1"), *between, *text("B=2"), SUF, *text("yz"), PRE, *text("ab"), MID]
        assert layout.tokens(gap(files=FILES), ROOM) == expected


def test_marks_are_known_by_their_names(tmp_path: Path) -> None:
    with prompts(fim_model(tmp_path / "names.gguf", metadata=False)) as layout:
        assert layout.tokens(gap(files=[]), ROOM) == [BOS, *HEAD, *OWN, PRE, *text("ab"), SUF, *text("yz"), MID]


@pytest.mark.parametrize("kind", [3, USER_DEFINED])
def test_what_is_written_like_a_mark_is_text(tmp_path: Path, kind: int) -> None:
    path = fim_model(tmp_path / "marks.gguf", names=("<P>", "<S>", "<M>", "<R>", "<F>"), kind=kind)
    with prompts(path) as layout:
        files = [{"filename": "<F>", "text": "<R>"}]
        tokens = layout.tokens(gap("x<P>", "<S><M>y", "<M>", files), ROOM)
    around = [PRE, *text("x<P><M>"), SUF, *text("<S><M>y"), MID]
    assert tokens == [BOS, *HEAD, SEP, *text("<F>\n<R>"), *OWN, *around]


@pytest.mark.parametrize(("n_marks", "missing"), [(0, "prefix and suffix and middle"), (2, "middle")])
def test_a_model_without_marks_is_refused(tmp_path: Path, n_marks: int, missing: str) -> None:
    with (
        prompts(fim_model(tmp_path / "few.gguf", n_marks)) as layout,
        pytest.raises(SamplingError, match=f"few.gguf has no token for {missing}, .* use a model trained"),
    ):
        layout.tokens(gap(), ROOM)


def test_what_is_nearest_to_the_gap_stays(tmp_path: Path) -> None:
    prefix, suffix = "".join(chr(65 + i % 26) for i in range(500)), "".join(chr(97 + i % 26) for i in range(500))
    with prompts(fim_model(tmp_path / "tiny.gguf")) as layout:
        for room in (5, 6, 30, 64, 100, 400):
            tokens = layout.tokens(gap(prefix, suffix, "-", FILES), room)
            assert len(tokens) <= room
            assert tokens[-1] == MID
            before, after = tokens[tokens.index(PRE) + 1 : tokens.index(SUF)], tokens[tokens.index(SUF) + 1 : -1]
            assert before == text(f"{prefix}-")[501 - len(before) :]
            assert after == text(suffix)[: len(after)]
            assert len(before) + len(after) > 0.85 * (room - 4)
            assert len(after) <= room // 4
        # What one does not need is the other's.
        tokens = layout.tokens(gap(prefix, "z"), 100)
        assert tokens[-3:] == [SUF, *text("z"), MID]
        assert len(tokens) > 90
        assert layout.tokens(gap("", suffix), 100)[3:-1] == text(suffix)[:92]
        with pytest.raises(ContextFull, match="leaves 0 tokens around the gap"):
            layout.tokens(gap(), 4)


def test_the_last_files_stay(tmp_path: Path) -> None:
    around = [PRE, *text("ab"), SUF, *text("yz"), MID]
    with prompts(fim_model(tmp_path / "tiny.gguf")) as layout:
        second = [SEP, *text("b.py\nB=2")]
        fixed = len([BOS, *HEAD, *OWN, *around])
        whole = layout.tokens(gap(files=FILES), fixed + 2 * len(second))
        assert whole == [BOS, *HEAD, SEP, *text("a.py\nA=1"), *second, *OWN, *around]
        cut = layout.tokens(gap(files=FILES), fixed + 2 * len(second) - 1)
        assert cut in [[BOS, *HEAD, SEP, *text(f"a.py\n{end}"), *second, *OWN, *around] for end in ("=1", "1")]
        assert layout.tokens(gap(files=FILES), fixed + len(second)) == [BOS, *HEAD, *second, *OWN, *around]
        assert layout.tokens(gap(files=FILES), fixed - 1) == [BOS, *around]
        empty = {"filename": "x" * 200, "text": ""}
        assert layout.tokens(gap(files=[empty, FILES[1]]), fixed + len(second)) == [BOS, *HEAD, *second, *OWN, *around]


def test_a_key_leaves_the_beginning_as_it_was(tmp_path: Path) -> None:
    """Cuts move in steps: most keys change nothing before the place where they were typed."""
    typed = "x" * 400
    files = [{"filename": "a", "text": "y" * 300}]
    with prompts(fim_model(tmp_path / "tiny.gguf")) as layout:
        for suffix in ("", "z" * 300):
            rows = [layout.tokens(gap(typed[:n], suffix, files=files), 320) for n in range(20, 400)]
            befores = [row[: row.index(SUF)] for row in rows]
            changed = sum(row[: len(before)] != before for before, row in zip(befores, rows[1:], strict=False))
            assert 0 < changed < 0.15 * len(rows)


def test_a_long_text_is_not_tokenized_whole(tmp_path: Path) -> None:
    counted = []

    class Counting(Model):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            counted.append(len(text))
            return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    model = Counting(fim_model(tmp_path / "tiny.gguf"), vocabulary_only=True)
    try:
        long = "x" * (1 << 20)
        files = [{"filename": "a", "text": long}] * 100
        assert len(InfillPrompts(model, "tiny").tokens(gap(long, long, long, files), 100)) <= 100
        assert max(counted) <= 800
        assert len(counted) < 12
    finally:
        model.close()


@contextmanager
def served(path: Path, **options: Any) -> Iterator[str]:
    config = EngineConfig(str(path), EngineOptions(threads=1, sequences=2, context=256), prefix_cache=0, **options)
    router = Router({"tiny": config})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(fim_model(tmp_path_factory.mktemp("fim") / "tiny.gguf")) as address:
        yield address


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(url + path, json={"temperature": 0, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


ASK = {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 6}
LAID_OUT = [BOS, *HEAD, *OWN, PRE, *text("abc"), SUF, *text("yz"), MID]


def test_infill_answers_as_the_same_tokens_do(url: str) -> None:
    plain = post(url, "/completion", prompt=LAID_OUT, n_predict=6)
    filled = post(url, "/infill", **ASK, prompt="c", return_tokens=True)
    assert filled["content"] == plain["content"]
    assert (filled["tokens_evaluated"], filled["tokens_predicted"]) == (len(LAID_OUT), 6)
    assert len(filled["tokens"]) == 6
    streamed = httpx.post(f"{url}/infill", json={**ASK, "prompt": "c", "temperature": 0, "stream": True}, timeout=60)
    events = events_of(streamed.text)
    assert "".join(event["content"] for event in events) == filled["content"]
    assert events[-1]["stop"] is True
    assert len(post(url, "/infill", **ASK, n=2)) == 2


def test_an_answer_has_its_room(url: str) -> None:
    """A context of 128 tokens: half of it at most is left to the answer, a fourth where nobody says how much."""
    long = {"input_prefix": "x" * 500, "input_suffix": ""}
    for n_predict, least, most in ((-1, 80, 96), (10, 100, 118), (1000, 50, 64)):
        reply = post(url, "/infill", **long, n_predict=n_predict, allow_repetition=True)
        assert least < reply["tokens_evaluated"] <= most


def test_the_next_key_finds_the_prompt_computed(url: str) -> None:
    files = [{"filename": "a.py", "text": "import b, c"}]
    first = post(url, "/infill", **ASK, input_extra=files, prompt="d = ")
    second = post(url, "/infill", **ASK, input_extra=files, prompt="d = e")
    assert second["tokens_evaluated"] == first["tokens_evaluated"] + 1
    assert second["tokens_cached"] == second["tokens_evaluated"] - len([*text("e"), SUF, *text("yz"), MID])


def test_what_plug_ins_send_is_taken(url: str) -> None:
    sent = {
        "n_indent": 4, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 500, "response_fields": ["content", "timings/prompt_n"], "id_slot": 0, "stop": [],
        "input_extra": [{"text": "x", "time": 1.5, "filename": "a.py"}],
    }  # fmt: skip
    assert post(url, "/infill", **{**ASK, **sent})["tokens_predicted"] == 6
    assert post(url, "/infill", **{**ASK, "n_predict": 0})["tokens_predicted"] == 0


def test_a_suffix_whole_and_streamed_by_the_official_client(url: str) -> None:
    from openai import OpenAI

    prompt = [BOS, PRE, *text("ab"), SUF, *text("yz"), MID]
    plain = post(url, "/v1/completions", prompt=prompt, max_tokens=6)
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        ask: Any = {"model": "tiny", "prompt": "ab", "suffix": "yz", "max_tokens": 6, "temperature": 0}
        whole = client.completions.create(**ask)
        chunks = list(client.completions.create(**ask, stream=True))
        several = client.completions.create(**{**ask, "prompt": ["ab", "a"]})
        ids = client.completions.create(**{**ask, "prompt": text("ab")})
        empty = client.completions.create(**{**ask, "suffix": ""})
    assert whole.choices[0].text == plain["choices"][0]["text"] == ids.choices[0].text == several.choices[0].text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert several.usage is not None
    assert several.usage.prompt_tokens == 2 * len(prompt) - 1
    assert empty.usage is not None
    assert empty.usage.prompt_tokens == 3  # a text to go on with


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix: Field required"),
        ("/infill", {"input_suffix": "a"}, "input_prefix: Field required"),
        ("/infill", {**ASK, "input_extra": "x"}, "input_extra: "),
        ("/infill", {**ASK, "input_extra": [{"filename": "a"}]}, "input_extra.0.text: Field required"),
        ("/infill", {**ASK, "input_extra": [{"text": "a"}] * 1025}, "input_extra: "),
        ("/infill", {**ASK, "prompt": [1, 2]}, "prompt: "),
        ("/infill", {**ASK, "suffix": "x"}, "use input_suffix"),
        ("/infill", {**ASK, "allowed_token_ids": [1]}, "allowed_token_ids is not supported"),
        ("/v1/completions", {"prompt": [999], "suffix": "x"}, "999 is not a token"),
        ("/v1/completions", {"prompt": "a", "suffix": 1}, "suffix: "),
    ],
)
def test_bad_input(url: str, path: str, body: dict[str, Any], error: str) -> None:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 400
    assert error in reply.json()["error"]["message"]


def test_a_served_model_without_marks_says_so(server: str) -> None:
    for path, body in (("/infill", ASK), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        reply = httpx.post(server + path, json=body, timeout=60)
        assert reply.status_code == 400
        assert "has no token for prefix and suffix and middle" in reply.json()["error"]["message"]


def test_the_suffix_comes_first_where_the_server_is_told_so_also_over_workers(tmp_path: Path) -> None:
    path = fim_model(tmp_path / "tiny.gguf")
    with (
        worker(tmp_path / "w", "--threads", "1") as other,
        served(path, workers=(other.address,), spm_infill=True) as url,
    ):
        laid_out = [BOS, *HEAD, *OWN, SUF, *text("yz"), PRE, *text("abc"), MID]
        plain = post(url, "/completion", prompt=laid_out, n_predict=6)
        filled = post(url, "/infill", **ASK, prompt="c")
        assert filled["content"] == plain["content"]
        assert filled["tokens_cached"] >= len(laid_out) - 1
