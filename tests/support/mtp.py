"""Models with multi-token-prediction layers, and drafts of such layers with a set acceptance."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.llama import llama
from edge.llama.llama import ContextSizes
from edge.llama.predicting import HiddenRows
from edge.llm.engine import Engine
from edge.speculate.hidden_states import Tokens
from edge.speculate.mtp import Predictor
from partition.predict.drafts import tokens_a_pass
from quant.gguf.file import GgufFile
from quant.types import cache_type
from tests.support.drafting import Answers
from tests.support.slices import rewritten, synthetic

ARCHITECTURES = (
    "glm4moe",
    "step35",
    "deepseek2",
    "hy_v3",
    "deepseek32",
    "glm-dsa",
    "mimo2",
    "qwen35",
    "qwen35moe",
    "qwen3next",
)
_DRAWS = 64
PROMPT = [5, 300, 17, 201, 88, 260, 33, 299]


def with_predictor(folder: Path, arch: str = "glm4moe", **figures: Any) -> Path:
    """A small random model with one such layer."""
    name = "-".join([arch, "mtp", *(f"{value}" for value in figures.values())])
    small = {"layers": 4, "embd": 64, "ff": 64, "vocab": 320, "predictors": 1}
    if arch == "mimo2":
        return _mimo(folder)
    return synthetic(folder / f"{name}.gguf", arch, **{**small, **figures})


def _mimo(folder: Path) -> Path:
    """One whose layer that drafts has another kind of attention and no experts, as the files of MiMo 2 have it."""
    path, layer = folder / "mimo2-mtp.gguf", "blk.4."
    if path.exists():
        return path
    plain = synthetic(folder / "mimo2.gguf", "mimo2", layers=5, embd=64, ff=64, vocab=320)
    rng = np.random.default_rng(0)
    matrices = {"attn_qkv": (128, 64), "nextn.eh_proj": (64, 128)}
    matrices |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (64, 64))
    add = {f"{layer}{name}.weight": rng.normal(0, 0.1, size).astype(np.float32) for name, size in matrices.items()}
    add |= {f"{layer}nextn.{name}.weight": np.ones(64, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    own = [name for name in GgufFile.open(plain).tensors if name.startswith(layer)]
    drop = [name for name in own if "exp" in name or "ffn_gate_inp" in name or re.search(r"attn_[qkv]\.", name)]
    return rewritten(plain, path, {"mimo2.nextn_predict_layers": ("u32", 1)}, add, drop)


def plant(predictor: Predictor, answers: Answers, acceptance: float, seed: int = 0, rows: int = 1) -> Callable[[], int]:
    """Let the drafts of a predictor, all of which it still computes, be right in this part of each answer's places:
    each is replaced by what the model will answer, or by another token. rows: of some draws the one is taken with which
    passes of so many rows bring about as many tokens as in the mean. Returns how many were drafted so far."""
    compute, rng, drafted = predictor.propose, np.random.default_rng(seed), [0]
    is_right = {prompt: _places(len(answer), acceptance, rng, rows) for prompt, answer in answers.items()}

    def propose(sequence: int, text: Tokens, start: int, n: int, assumed: Sequence[int] = ()) -> list[int]:
        drafts = compute(sequence, text, start, n, assumed)
        prompt = next((p for p in answers if start == 0 and tuple(text[: len(p)].tolist()) == p), None)
        if prompt is None:
            return drafts
        at = len(text) + len(assumed) - len(prompt)
        right = answers[prompt][at : at + len(drafts)]
        drafted[0] += len(right)
        return [token ^ int(not is_right[prompt][at + i]) for i, token in enumerate(right)]

    predictor.propose = propose  # type: ignore[method-assign]
    return lambda: drafted[0]


def _places(n: int, acceptance: float, rng: np.random.Generator, rows: int) -> NDArray[np.bool_]:
    """Return whether a draft of each of `n` places is right."""
    draws = [rng.permutation(n) < round(acceptance * n) for _ in range(_DRAWS if rows > 1 else 1)]
    mean = tokens_a_pass(acceptance, rows)
    return min(draws, key=lambda is_right: abs(_tokens_a_pass(is_right, rows) - mean))


def _tokens_a_pass(is_right: NDArray[np.bool_], rows: int) -> float:
    """That passes of so many rows bring in the mean of an answer, whose first token is there."""
    at, n_passes = 1, 0
    while at < len(is_right):
        of_pass = is_right[at : at + rows - 1]
        at += 1 + (len(of_pass) if of_pass.all() else int(of_pass.argmin()))
        n_passes += 1
    return (at - 1) / max(1, n_passes)


class PassClock:
    """Time goes on by what a step of the engine takes, by its rows, and what the predictor takes, by its tokens."""

    def __init__(self, engine: Engine, predictor: Predictor, costs: dict[int, float], draft_s: float) -> None:
        """costs: seconds of a pass, by its rows. draft_s: of a draft."""
        self.now = 0.0
        submit, propose, take_in = engine.submit, predictor.propose, predictor.take_in

        def timed_submit(tokens, *rows, **how):  # type: ignore[no-untyped-def]
            submit(tokens, *rows, **how)
            self.now += passes(len(tokens))

        def passes(rows: int) -> float:
            return next((cost for size, cost in costs.items() if size >= rows), rows / 8)

        def timed_propose(sequence: int, text: Tokens, start: int, n: int, assumed: tuple[int, ...] = ()) -> list[int]:
            self.now += n * draft_s
            return propose(sequence, text, start, n, assumed)

        def timed_take_in(sequence: int, text: Tokens, start: int, *, whole: bool) -> None:
            self.now += predictor.behind(sequence, text, start, whole=whole) * draft_s / 4
            take_in(sequence, text, start, whole=whole)

        engine.submit = timed_submit  # type: ignore[method-assign]
        predictor.propose = timed_propose  # type: ignore[method-assign,assignment]
        predictor.take_in = timed_take_in  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now


def drafts_by_llama_cpp(path: Path, text: Sequence[int], n: int) -> list[int]:
    """`n` drafts behind a text, by llama.cpp alone: the text in one decode of the model and one of its predictor, which
    lives in the same model."""
    sizes = ContextSizes(256, cache_type("f16"), 128, outputs=128)
    model = llama.Model(path, predictors=True)
    target, own = llama.Context(model, sizes), llama.Context(model, replace(sizes, predicts=True))
    try:
        states, drafted = HiddenRows(target), HiddenRows(own)
        states.give()
        drafted.give(only_outputs=True)
        rows = llama.Batch(128)
        rows.tokens[: len(text)], rows.positions[: len(text)] = text, range(len(text))
        rows.outputs[len(text) - 2] = 1
        target.decode(rows, len(text) - 1)
        hidden = states.rows(len(text) - 1).copy()
        both = llama.Batch(128, hidden.shape[1], both=True)
        drafts: list[int] = []
        n_before = len(text) - 2
        both.tokens[:n_before], both.embeddings[:n_before] = text[1:-1], hidden[:-1]
        both.positions[:n_before] = range(1, 1 + n_before)
        own.decode(both, n_before)
        token, state, both.outputs[0] = text[-1], hidden[-1], 1
        while len(drafts) < n:  # one row at a time: all graphs give its hidden state first
            both.tokens[0], both.embeddings[0], both.positions[0] = token, state, len(text) - 1 + len(drafts)
            own.decode(both, 1)
            token, state = int(own.logits(0).argmax()), drafted.rows(1)[0].copy()
            drafts.append(token)
        return drafts
    finally:
        own.close()
        target.close()
        model.close()
