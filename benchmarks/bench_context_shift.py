"""A full context that is shifted in place beside one that is computed again: the next token, and what is predicted.

    python benchmarks/bench_context_shift.py [--model FILE | --shape NAME] [--rounds 60] [--json]

speed: in a context that is nearly full some usual tokens are computed, then some are dropped in place and one more
token computed, with as much before it as the usual ones have: what a shift costs does not depend on how many it drops.
Every tenth round drops half and computes the rest again. Ratios are of medians and of bests, to the usual token;
asked is 1.2 for a shift. perplexity: held-out dialogues that the bundled model was not trained on, token by token
through a small context; every time it is full, both sides drop the same tokens. Predictions before the first drop are
not counted, as they are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from report import steal_s

from devices.probe import default_threads
from edge.demo import MODEL_PATH
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sequence import Session
from edge.models import synth
from edge.models.presets import SHAPES
from tools.demo_model.grammar import held_out

ASKED = 1.2
BEGINNING = 16  # tokens that stay, where no system message says
USUAL = 8  # tokens before the context is full
COMPUTED_AGAIN = 10  # rounds; it takes long
SOON = 32  # tokens after a drop

MakeRoom = Callable[[Session, int, int], NDArray[np.float32]]
"""(session, tokens of the beginning, next token): drop half of the rest, and the logits after the next token."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_PATH, help="GGUF file for speed (default: the bundled one)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="for speed: a random model of this shape, Q4_0")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--context", type=int, default=1024, help="for speed")
    parser.add_argument("--small-context", type=int, default=256, help="for perplexity")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dialogues", type=int, default=12)
    parser.add_argument("--questions", type=int, default=24, help="of a dialogue")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to see that it works")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.context, args.small_context, args.rounds, args.dialogues, args.questions = 128, 128, 2, 1, 10
    began, stolen_s = time.perf_counter(), steal_s()
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {args.threads} threads",
        "versions": f"Python {platform.python_version()}, llama-cpp-python {llama_cpp.__version__}",
        "speed": speed(args),
        "perplexity": perplexity(args),
        "took_s": time.perf_counter() - began,
        "steal_s": steal_s() - stolen_s,
    }
    print(json.dumps(result) if args.json else tables(result))


def shift(session: Session, beginning: int, token: int) -> NDArray[np.float32]:
    """In place."""
    session.make_room(beginning)
    return session.step(token)


def recompute(session: Session, beginning: int, token: int) -> NDArray[np.float32]:
    """All of the rest again."""
    tokens = session.tokens
    rest = [*tokens[:beginning], *tokens[beginning + (len(tokens) - beginning) // 2 :], token]
    session.cut(0)
    return session.prefill(rest)


SIDES: dict[str, MakeRoom] = {"shift": shift, "recompute": recompute}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a usual token in a context that is nearly full, and of the first one after each kind of drop."""
    taken: dict[str, list[float]] = {name: [] for name in ("usual", *SIDES)}
    with model(args) as path, Engine(path, EngineOptions(threads=args.threads, context=args.context)) as engine:
        random = np.random.default_rng(0).integers
        session = Session(engine)
        for turn in range(-1, args.rounds):  # the first round is the warm-up
            again = turn % COMPUTED_AGAIN == 0
            missing = engine.context - USUAL - len(session.tokens)
            if missing:
                session.prefill([*session.tokens, *random(0, engine.model.n_vocab, missing).tolist()])
            usual = [milliseconds(lambda: session.step(7)) for _ in range(USUAL)]
            after = milliseconds(lambda: shift(session, engine.context - 2 * (USUAL + 1), 7))
            if turn >= 0:
                taken["usual"] += usual
                taken["shift"].append(after)
            if again:
                taken["recompute"].append(milliseconds(lambda: recompute(session, BEGINNING, 7)))
    figures = {name: {"median_ms": statistics.median(ms), "best_ms": min(ms)} for name, ms in taken.items()}
    ratios = {
        name: {of: figures[name][f"{of}_ms"] / figures["usual"][f"{of}_ms"] for of in ("median", "best")}
        for name in SIDES
    }
    return {"model": args.shape or path.name, "context": args.context, "tokens": figures, "ratios": ratios}


@contextmanager
def model(args: argparse.Namespace) -> Iterator[Path]:
    """The file whose speed is measured."""
    if args.shape is None:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{args.shape}.gguf"
        synth.synthesize(path, SHAPES[args.shape], "q4_0", "q8_0")
        yield path


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def perplexity(args: argparse.Namespace) -> dict[str, Any]:
    """Of the same predictions on both sides: all after the first drop, and the first SOON after each drop."""
    context = args.small_context
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=context)) as engine:
        texts = [dialogue(engine, seed, args.questions) for seed in range(args.dialogues)]
        nll = {name: [scored(engine, *text, make_room) for text in texts] for name, make_room in SIDES.items()}
    rows = {}
    for name, of_texts in nll.items():
        values, since = (np.concatenate(column) for column in zip(*of_texts, strict=True))
        rows[name] = {"all": float(np.exp(values.mean())), "soon": float(np.exp(values[since < SOON].mean()))}
    return {
        "context": context,
        "dialogues": len(texts),
        "predictions": len(values),
        "drops": int((since == 0).sum()),
        "rows": rows,
        "ratio": rows["shift"]["all"] / rows["recompute"]["all"],
        "ratio_soon": rows["shift"]["soon"] / rows["recompute"]["soon"],
    }


def dialogue(engine: Engine, seed: int, questions: int) -> tuple[list[int], int]:
    """The tokens of a long dialogue of held-out questions with their answers, and how many its system message has."""
    chat = Chat(engine, system="You are a helpful assistant.")
    beginning = 0
    for messages, answer in held_out(questions, seed=1000 + seed):
        chat.messages += [
            *(one for one in messages if one["role"] != "system"),
            {"role": "assistant", "content": answer},
        ]
        beginning = beginning or chat._beginning(chat.prompt_tokens())
    return chat.prompt_tokens(), beginning


def scored(
    engine: Engine, tokens: Sequence[int], beginning: int, make_room: MakeRoom
) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """Of each prediction after the first drop: minus the log-probability of the token that came, and tokens since the
    last drop."""
    session, values, since, ago = Session(engine), [], [], -1
    logits = session.prefill(tokens[:beginning])
    for token in tokens[beginning:]:
        if ago >= 0:
            x = logits.astype(np.float64)
            values.append(float(np.logaddexp.reduce(x) - x[token]))
            since.append(ago)
            ago += 1
        if session.full:
            logits, ago = make_room(session, beginning, token), 0
        else:
            logits = session.step(token)
    return np.array(values), np.array(since)


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    speed, quality = result["speed"], result["perplexity"]
    lines = [
        f"{result['machine']}, {result['versions']}; {result['took_s']:.0f} s, steal {result['steal_s']:.1f} s",
        "",
        f"{speed['model']}, context {speed['context']}:",
        "",
        "| token | median, ms | best, ms | of usual: median | best |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, label in (
        ("usual", "usual"),
        ("shift", "after a shift"),
        ("recompute", "after computing the rest again"),
    ):
        row, ratio = speed["tokens"][name], speed["ratios"].get(name, {"median": 1.0, "best": 1.0})
        cells = (row["median_ms"], row["best_ms"], ratio["median"], ratio["best"])
        lines.append(f"| {label} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    lines += [
        "",
        f"Asked: {ASKED} of a usual token after a shift.",
        "",
        f"Bundled model, context {quality['context']}, {quality['predictions']} predictions in {quality['dialogues']}"
        f" held-out dialogues, {quality['drops']} drops:",
        "",
        f"| perplexity | all | first {SOON} after a drop |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {row['all']:.4f} | {row['soon']:.4f} |" for name, row in quality["rows"].items()),
        f"| ratio | {quality['ratio']:.4f} | {quality['ratio_soon']:.4f} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
