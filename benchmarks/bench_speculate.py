"""Several drafts in flight over two stages: answers with prompt-lookup drafts compared with answers without drafts.

    python benchmarks/bench_speculate.py [--work DIR] [--rounds 3] [--model 1b|demo] [--json [FILE]] [--tiny]

The two stages are threads of this process, with a latency of 10 ms in each direction. Weights are random, so the
benchmark first computes a greedy answer; the text before the prompt is this answer with a fraction of its tokens
unchanged, as in an edited text. One engine computes answers with and without drafts in turn; each fraction has a
conversation of its own, and its first answer, in which the drafter measures costs, has a separate figure. Ratios are
ratios of medians; the table also shows the smallest and the largest ratio of all rounds. The prediction is the one of a
plan (`partition.predict.drafts`) for that acceptance: it uses the best numbers of rows and windows for the measured
times of passes and stages, and no cost of learning. Answers are also measured with fixed numbers of rows and windows,
and a fixed fraction of right drafts. For drafts on one device, on far ranks, with paged weights and with trained
weights, see bench_drafts.py.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Section, alternate, bench, compared, parser_of, table
from benchmarks.paging_runs import Models
from edge.llm.continuation import Request
from edge.llm.generate import generate
from edge.llm.interface import TextEngine, VerifyResult
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from edge.parallel.engine import DistributedEngine
from edge.planning.measure import windows_s
from edge.speculate.bench import pass_ms
from edge.speculate.choice import MOST_ROWS
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import Drafts, Speculation
from partition.predict.drafts import ROWS, WINDOWS, Draft, most_windows
from tests.support.ranks_here import ranks_here

CONTEXT = 512
PROMPT = 32  # tokens
SHAPES = [(rows, windows) for rows in (1, 2, 4) for windows in (1, 2, 4) if rows * windows > 1]
SHAPES_RIGHT = 0.75  # of drafts
_ANSWERS = 3  # of each shape
_PASSES = 5  # of each size, for what keeps stages busy
LEAST_ANSWER = 8  # tokens; a prompt with a shorter one is left for another
DELAY_S = 10e-3  # each way


@dataclass(frozen=True)
class Case:
    """A model, and answers of it."""

    model: str
    tokens: int  # of an answer
    rights: Sequence[float]
    target: str = ""  # of the ratio


CASES = [
    Case("1b", 128, (0.0, 0.75, 0.9, 1.0), target=">= 1.9 of a text that is copied"),
    Case("demo", 128, (0.0, 0.75, 0.9, 1.0)),  # which computes so little that ways are nearly all there is
]
TINY = [Case("tiny", LEAST_ANSWER, (0.0, 0.75))]


def stages(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each case."""
    work = args.work or folder / "models"
    work.mkdir(parents=True, exist_ok=True)
    models, cases = Models(work, keep=True), TINY if args.tiny else CASES
    rounds = 1 if args.tiny else args.rounds
    results = []
    for case in cases:
        if args.model in (None, case.model):
            path = MODEL_PATH if case.model == "demo" else models(case.model)
            results.append(measured(case, path, folder, rounds))
    return {"rounds": rounds, "cases": results}


class Copied(NgramDrafts):
    """Prompt lookup in a text that begins with the answer, of which this fraction is unchanged."""

    def __init__(self, answer: Sequence[int], right: float) -> None:
        super().__init__()
        wrong = set(random.Random(0).sample(range(len(answer)), round((1 - right) * len(answer))))
        self._before = [token ^ 1 if place in wrong else token for place, token in enumerate(answer)]

    def begin(self, prompt: Sequence[int]) -> None:
        """The answer begins."""
        super().begin([*self._before, *prompt])


class Counted(Speculation):
    """Drafts whose acceptance is counted over all answers."""

    def __init__(self, drafts: Drafts) -> None:
        super().__init__(lambda: drafts, "known")
        self.right = self.looked_at = 0

    def verified(self, results: Sequence[VerifyResult]) -> None:
        """A pass is over."""
        super().verified(results)
        [window] = results
        self.right += window.right
        self.looked_at += window.looked_at

    @property
    def acceptance(self) -> float:
        """The part of the drafts that was right, each for itself."""
        return self.right / self.looked_at if self.looked_at else 0.0


def measured(case: Case, path: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Answers of one engine without drafts, and with some of which a fraction is right."""
    how = {"parallel": "pipeline", "shares": (1, 1)}
    options = EngineOptions(threads=1, context=CONTEXT, outputs=MOST_ROWS, batch=64)
    with ranks_here(path, how, options, folder, delay_s=DELAY_S) as engine:
        prompt, answer = known_answer(engine, case.tokens)
        drafters = {right: Counted(Copied(answer, right)) for right in case.rights}
        rates: dict[str, list[float]] = defaultdict(list)
        same = dict.fromkeys(case.rights, True)

        def plain() -> dict[str, float]:
            rates["plain"].append(run(engine, prompt, case.tokens, None)[0])
            return {"tokens_per_s": rates["plain"][-1]}

        def drafted(right: float) -> dict[str, float]:
            rate, tokens = run(engine, prompt, case.tokens, drafters[right])
            rates[str(right)].append(rate)
            same[right] &= tokens == answer
            return {"tokens_per_s": rate}

        sides = {"plain": plain} | {str(right): lambda right=right: drafted(right) for right in case.rights}
        result = alternate(sides, rounds)
        passes = pass_ms(engine, prompt)
        busy, n_stages = busy_ms(engine, prompt), engine.stages
        shapes = [of_shape(engine, *shape, passes, busy) for shape in (SHAPES[:2] if case in TINY else SHAPES)]
    rows = [
        {
            "right": right,
            "tokens_per_s": median(item["tokens_per_s"] for item in result[str(right)]),
            "same": same[right],
            "first_ratio": rates[str(right)][0] / rates["plain"][0],
            **drafters[right].to_json(),
            **predicted(drafters[right].acceptance, passes, busy, n_stages),
            **{key: compared(result, str(right), "plain")[0][key] for key in ("ratio", "least", "most")},
        }
        for right in case.rights
    ]
    return {
        "model": case.model,
        "tokens": case.tokens,
        "asked": case.target,
        "plain_tokens_per_s": median(item["tokens_per_s"] for item in result["plain"]),
        "pass_ms": {str(size): ms for size, ms in passes.items()},
        "busy_ms": {str(size): ms for size, ms in busy.items()},
        "rows": rows,
        "shapes": shapes,
    }


def busy_ms(engine: DistributedEngine, prompt: list[int]) -> dict[int, float]:
    """Return how long a pass of each size keeps the busiest stage: the median."""
    slot = Slot(engine)
    slot.prefill(prompt, top=1)
    results = {}
    for size in ROWS:
        engine.times(clear=True)
        for _ in range(_PASSES):
            slot.decode([0] * size, "all", top=1)
            slot.forget(size)
        results[size] = max(time.compute_ms.median for times in engine.times() for time in times.values())
    return results


def predicted(
    acceptance: float, passes: dict[int, float], busy: dict[int, float], stages: int
) -> dict[str, float | int]:
    """Return the gain that a plan counts on where so many drafts are right, and the rows and windows that bring it."""
    times = {}
    for rows in ROWS:
        for windows in WINDOWS:
            if windows <= most_windows(stages):
                draft = Draft("any", acceptance, rows, windows=windows)
                times[rows, windows] = float(draft.token_s(passes[rows], busy[rows]))
    rows, windows = min(times, key=times.__getitem__)
    return {
        "acceptance": acceptance,
        "predicted_ratio": passes[1] / times[rows, windows],
        "predicted_rows": rows,
        "predicted_windows": windows,
    }


def of_shape(
    engine: TextEngine, rows: int, windows: int, passes: dict[int, float], busy: dict[int, float]
) -> dict[str, Any]:
    """Answers with windows of one shape, the best of some, beside what a plan predicts."""
    draft = Draft("any", SHAPES_RIGHT, rows, windows=windows)
    ms = 1e3 * min(windows_s(engine, PROMPT, draft) for _ in range(_ANSWERS))
    return {
        "rows": rows,
        "windows": windows,
        "right": SHAPES_RIGHT,
        "ratio": passes[1] / ms,
        "predicted_ratio": passes[1] / float(draft.token_s(passes[rows], busy[rows])),
    }


def known_answer(engine: TextEngine, n_tokens: int) -> tuple[list[int], list[int]]:
    """A prompt, and the greedy answer to it."""
    chosen = np.random.default_rng(0)
    while True:
        prompt = chosen.integers(4, engine.model.n_vocab, PROMPT).tolist()
        answer = run(engine, prompt, n_tokens, None)[1]
        if len(answer) >= min(LEAST_ANSWER, n_tokens):
            return prompt, answer


def run(engine: TextEngine, prompt: list[int], most: int, drafter: Speculation | None) -> tuple[float, list[int]]:
    """(tokens a second after the first, tokens) of an answer."""
    greedy = SamplingParams(temperature=0, allow_repetition=True)
    responses = list(generate(Scheduler(engine, slots=1, keep=True, drafter=drafter), Request(prompt, most, greedy)))
    return responses[-1].timing.decode_tokens_per_s, [r.token_id for r in responses if r.token_id is not None]


def text(r: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts: list[str] = []
    for case in r["cases"]:
        first = case["pass_ms"]["1"]
        passes = ", ".join(f"{rows}: {ms / first:.2f}" for rows, ms in case["pass_ms"].items())
        lines = [
            [
                f"{row['right']}",
                *(f"{row[key]:.2f}" for key in ("tokens_per_s", "ratio", "least", "most", "first_ratio")),
                f"{row['rows_per_pass']:.1f}",
                f"{row['accepted']} of {row['drafted']}",
                f"{row['predicted_ratio']:.2f}",
                f"{row['predicted_rows']} x {row['predicted_windows']}",
                "yes" if row["same"] else "no",
            ]
            for row in case["rows"]
        ]
        shapes = [
            [f"{shape['rows']} x {shape['windows']}", f"{shape['ratio']:.2f}", f"{shape['predicted_ratio']:.2f}"]
            for shape in case["shapes"]
        ]
        header = ["right", "tokens/s", "of plain", "least", "most", "first answer", "rows a pass", "accepted"]
        parts += [
            f"{case['model']}, {case['tokens']} tokens, {case['plain_tokens_per_s']:.2f} a second without drafts; a"
            f" pass of {first:.1f} ms, by rows {passes}. Asked: {case['asked'] or 'nothing'}.",
            table([*header, "predicted of plain", "by rows x windows", "same"], lines),
            f"Windows of one shape, {SHAPES_RIGHT:g} of the drafts right:",
            table(["rows x windows", "of plain", "predicted"], shapes),
        ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    arguments = parser_of(__doc__, rounds=3)
    arguments.add_argument("--work", type=Path, help="folder for model files (default: a temporary one)")
    arguments.add_argument("--model", choices=("1b", "demo"), help="measure this one alone")
    bench(arguments, Section(stages, text))
