"""Answers whose tokens are guessed beside the same without, by how many guesses are right.

    python benchmarks/bench_speculate.py [--only disk|resident|far|stages] [--work DIR] [--rounds 3] [--json]

| section  | question                                                                                     |
| disk     | what do guesses bring where weights are read for every token, within a budget of memory?     |
| resident | what do they cost where they cannot bring much: weights in memory, one thread?               |
| far      | what do they bring on two tensor ranks, threads of this process, with 5 ms on every way?     |
| stages   | what do n-grams bring on two stages, threads of this process, with 10 ms on every way?       |

Models have random weights, which nothing can guess. So a greedy answer is computed first; guesses are its tokens, of
which a fraction is right, in random places. On stages guesses are n-grams, of a text before the prompt: the answer, of
which that fraction is unchanged, as in a text that is edited; and of what the answer itself repeats. Answers with
guesses and without are measured in turn on one engine; each fraction has a conversation of its own, whose first answer,
where it learns, has a figure of its own. Ratios are of medians, beside them the least and the largest of any round.
Predicted is what a plan counts on (`partition.predict.drafts`) for the fraction of guesses that was right: with the
rows, and on stages the windows, that are the best by the times of passes and of stages as they are here, and with
nothing that learning costs. On stages answers are measured with each shape by itself, too: some rows and windows, of
whose guesses a fixed part is right. The ratio by passes, where these do not overlap, comes of the passes of all
answers, the first included, and of the median time of a pass of each size: what else the machine does changes it
little. Model files are written to DIR, and used again where they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from paging_runs import GIB, MIB, Models
from sides import alternate, compared

from devices.probe import default_threads, own_rss
from edge.demo import MODEL_PATH
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.interface import TextEngine, VerifyResult
from edge.llm.options import EngineOptions
from edge.llm.sampler import LogitsRequest, SamplingParams
from edge.llm.sequence import Session
from edge.parallel.engine import DistributedEngine
from edge.planning.measure import windows_s
from edge.speculate.bench import pass_ms
from edge.speculate.choice import MOST_ROWS
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import Drafts, Speculation
from edge.version import version
from partition.predict.drafts import ROWS, WINDOWS, Draft, most_windows
from tests.support.ranks_here import ranks_here

SECTIONS = ("disk", "resident", "far", "stages")
CONTEXT = 512
PROMPT = 32  # tokens
SHAPES = [(rows, windows) for rows in (1, 2, 4) for windows in (1, 2, 4) if rows * windows > 1]
SHAPES_RIGHT = 0.75  # of guesses
_ANSWERS = 3  # of each shape
_PASSES = 5  # of each size, for what keeps stages busy
LEAST_ANSWER = 8  # tokens; a prompt with a shorter one is left for another
DELAY_S = {"far": 5e-3, "stages": 10e-3}  # each way


@dataclass(frozen=True)
class Case:
    """A model, and how much of it may be in memory."""

    model: str
    tokens: int  # of an answer
    rights: Sequence[float]
    budget: int | None = None  # bytes; 0: what half of the weights fit into
    asked: str = ""  # of the ratio
    large: bool = False  # measured only where --model names it


CASES = {
    "disk": [
        Case("8b", 48, (0.75,), 3 * GIB // 2, ">= 2.5"),
        Case("70b", 24, (0.75,), int(3.1 * GIB), ">= 3.5", large=True),
        Case("1b", 96, (0.0, 0.5, 0.75, 0.9), 450 * MIB),
    ],
    "resident": [Case("1b", 128, (0.0, 0.25, 0.5, 0.75, 0.9), asked=">= 0.98")],
    "far": [Case("1b", 96, (0.0, 0.75), asked=">= 2.5 at 0.75")],
    "stages": [
        Case("1b", 128, (0.0, 0.75, 0.9, 1.0), asked=">= 1.9 of a text that is copied"),
        Case("demo", 128, (0.0, 0.75, 0.9, 1.0)),  # which computes so little that ways are nearly all there is
    ],
}
TINY = {name: [Case("tiny", LEAST_ANSWER, (0.0, 0.75), 0 if name == "disk" else None)] for name in SECTIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--work", type=Path, help="folder for model files (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="measure this case of a section alone: 1b, 8b, demo, or 70b, a file of 40 GB")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to see that it works")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.rounds = 1
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, llama-cpp-python {version('llama-cpp-python')}",
    }
    with tempfile.TemporaryDirectory() as name:
        work = args.work or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        models = Models(work, keep=True)
        for section in [args.only] if args.only else SECTIONS:
            cases = (TINY if args.tiny else CASES)[section]
            result[section] = [
                measured(
                    section,
                    case,
                    MODEL_PATH if case.model == "demo" else models(case.model),
                    Path(name),
                    args.rounds,
                )
                for case in cases
                if args.model == case.model or (args.model is None and not case.large)
            ]
            if not args.json:
                print(f"## {section}\n\n{tables(result[section])}\n", flush=True)
    if args.json:
        print(json.dumps(result))


class Known:
    """Guesses the tokens of an answer that is known, of which this fraction is right."""

    free = False  # as those of a model

    def __init__(self, answer: Sequence[int], right: float) -> None:
        wrong = set(random.Random(0).sample(range(len(answer)), round((1 - right) * len(answer))))
        self._guesses = [token ^ 1 if place in wrong else token for place, token in enumerate(answer)]
        self._at = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """The answer begins."""
        self._at = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """It went on."""
        self._at += len(tokens)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """What follows."""
        start = self._at + len(assumed)
        return self._guesses[start : start + n]


class Copied(NgramDrafts):
    """N-grams of the text, before which an answer stands of which this fraction is unchanged."""

    def __init__(self, answer: Sequence[int], right: float) -> None:
        super().__init__()
        spoiled = Known(answer, right)
        spoiled.begin(())
        self._before = spoiled.draft(len(answer))

    def begin(self, prompt: Sequence[int]) -> None:
        """The answer begins."""
        super().begin([*self._before, *prompt])


class Counted(Speculation):
    """Guesses that are counted over all answers."""

    def __init__(self, drafts: Drafts) -> None:
        super().__init__(drafts, "known")
        self.passes: Counter[int] = Counter()  # by rows
        self.gave = 0  # tokens
        self.right = self.looked_at = 0  # guesses

    def checked(self, window: VerifyResult) -> None:
        """A pass is over."""
        super().checked(window)
        self.passes[window.rows] += 1
        self.gave += window.used
        self.right += window.right
        self.looked_at += window.looked_at

    @property
    def acceptance(self) -> float:
        """The part of the guesses that was right, each for itself."""
        return self.right / self.looked_at if self.looked_at else 0.0

    def of_plain(self, pass_ms: dict[int, float]) -> float:
        """How many times as fast the tokens of all answers came, were each pass as long as the median of its size."""
        return self.gave * pass_ms[1] / sum(n * pass_ms[rows] for rows, n in self.passes.items())


@contextmanager
def loaded(section: str, case: Case, path: Path, folder: Path) -> Iterator[TextEngine]:
    """The engine of a section."""
    all_cores = section == "disk" and case.model != "tiny"
    options = {"threads": default_threads() if all_cores else 1, "context": CONTEXT, "outputs": MOST_ROWS}
    if section in DELAY_S:
        how = {"parallel": "tensor" if section == "far" else "pipeline", "shares": (1, 1)}
        with ranks_here(path, how, EngineOptions(**options, batch=64), folder, delay_s=DELAY_S[section]) as ranks:
            yield ranks
        return
    memory = case.budget
    if memory == 0:
        with Engine(path, EngineOptions(**options, memory=own_rss() + GIB)) as whole:
            memory = whole.memory.total - path.stat().st_size // 2
    with Engine(path, EngineOptions(**options, memory=memory)) as engine:
        yield engine


def measured(section: str, case: Case, path: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Answers of one engine without guesses, and with some of which a fraction is right."""
    began = time.monotonic()
    with loaded(section, case, path, folder) as engine:
        prompt, answer = known_answer(engine, case.tokens)
        drafts = Copied if section == "stages" else Known
        drafters = {right: Counted(drafts(answer, right)) for right in case.rights}
        rates: dict[str, list[float]] = defaultdict(list)
        same = dict.fromkeys(case.rights, True)

        def plain() -> dict[str, float]:
            rates["plain"].append(run(engine, prompt, case.tokens, None)[0])
            return {"tokens_per_s": rates["plain"][-1]}

        def guessed(right: float) -> dict[str, float]:
            rate, tokens = run(engine, prompt, case.tokens, drafters[right])
            rates[str(right)].append(rate)
            same[right] &= tokens == answer
            return {"tokens_per_s": rate}

        sides = {"plain": plain} | {str(right): lambda right=right: guessed(right) for right in case.rights}
        found = alternate(sides, rounds)
        passes = pass_ms(engine, prompt)
        busy, stages = busy_ms(engine, prompt), engine.stages
        shapes = [of_shape(engine, *shape, passes, busy) for shape in SHAPES] if busy else []
    rows = [
        {
            "right": right,
            "tokens_per_s": median(one["tokens_per_s"] for one in found[str(right)]),
            "same": same[right],
            "first_ratio": rates[str(right)][0] / rates["plain"][0],
            "ratio_by_passes": None if section == "stages" else drafters[right].of_plain(passes),  # they overlap
            **drafters[right].to_json(),
            **predicted(drafters[right].acceptance, passes, busy, stages),
            **{key: compared(found, str(right), "plain")[0][key] for key in ("ratio", "least", "most")},
        }
        for right in case.rights
    ]
    return {
        "model": case.model,
        "tokens": case.tokens,
        "budget_bytes": case.budget,
        "asked": case.asked,
        "rounds": rounds,
        "plain_tokens_per_s": median(one["tokens_per_s"] for one in found["plain"]),
        "pass_ms": {str(size): ms for size, ms in passes.items()},
        "busy_ms": {str(size): ms for size, ms in busy.items()},
        "rows": rows,
        "shapes": shapes,
        "took_s": time.monotonic() - began,
    }


def busy_ms(engine: TextEngine, prompt: list[int]) -> dict[int, float]:
    """How long a pass of each size keeps the busiest stage: the median. Empty where there are no stages."""
    if not isinstance(engine, DistributedEngine) or engine.stages == 1:
        return {}
    session = Session(engine)
    session.wanted = lambda _: LogitsRequest(1)
    session.prefill(prompt)
    found = {}
    for size in ROWS:
        engine.times(clear=True)
        for _ in range(_PASSES):
            session.check([0] * size)
            session.forget(size)
        found[size] = max(one.compute_ms.median for times in engine.times() for one in times.values())
    return found


def predicted(
    acceptance: float, passes: dict[int, float], busy: dict[int, float], stages: int
) -> dict[str, float | int]:
    """What a plan counts on where so many guesses are right: the gain, and the rows and windows that bring it."""
    times = {}
    for rows in ROWS:
        for windows in WINDOWS:
            if windows <= most_windows(stages):
                draft = Draft("any", acceptance, rows, windows=windows)
                times[rows, windows] = float(draft.token_s(passes[rows], busy.get(rows, 0.0)))
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
    responses = list(generate(Session(engine), prompt, greedy, max_tokens=most, drafter=drafter))
    return responses[-1].timing.decode_tokens_per_s, [r.token_id for r in responses if r.token_id is not None]


def tables(cases: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines: list[str] = []
    for case in cases:
        budget = "" if not case["budget_bytes"] else f" in {case['budget_bytes'] // MIB} MiB"
        one = case["pass_ms"]["1"]
        passes = ", ".join(f"{rows}: {ms / one:.2f}" for rows, ms in case["pass_ms"].items())
        lines += [
            f"{case['model']}{budget}, {case['tokens']} tokens, {case['plain_tokens_per_s']:.2f} a second without"
            f" guesses; a pass of {one:.1f} ms, by rows {passes}. Asked: {case['asked'] or 'nothing'}. Took"
            f" {case['took_s']:.0f} s.",
            "",
            "| right | tokens/s | of plain | least | most | first answer | by passes | rows a pass | accepted |"
            " predicted of plain | by rows x windows | same |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        ]
        for row in case["rows"]:
            figures = (row[key] for key in ("tokens_per_s", "ratio", "least", "most", "first_ratio", "ratio_by_passes"))
            cells = " | ".join("" if figure is None else f"{figure:.2f}" for figure in figures)
            same = "yes" if row["same"] else "no"
            accepted = f"{row['accepted']} of {row['drafted']}"
            shape = f"{row['predicted_ratio']:.2f} | {row['predicted_rows']} x {row['predicted_windows']}"
            lines.append(f"| {row['right']} | {cells} | {row['rows_per_pass']:.1f} | {accepted} | {shape} | {same} |")
        if case["shapes"]:
            lines += [
                "",
                f"Windows of one shape, {SHAPES_RIGHT:g} of the guesses right:",
                "",
                "| rows x windows | of plain | predicted |",
                "| ---: | ---: | ---: |",
            ]
        for one in case["shapes"]:
            lines.append(f"| {one['rows']} x {one['windows']} | {one['ratio']:.2f} | {one['predicted_ratio']:.2f} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
