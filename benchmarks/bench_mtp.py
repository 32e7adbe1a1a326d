"""Drafts by a model's own layers (MTP) with set probabilities of being right, compared with answers without drafts.

    python -m benchmarks.bench_mtp [--only SECTION] [--work DIR] [--rounds 3] [--tokens 96] [--json [FILE]] [--tiny]

| section | where the target model runs                                                             |
| one     | on this device, with all weights in memory                                              |
| tensor  | on two tensor-parallel ranks, threads of this process with a latency of 5 ms            |
| stages  | on two stages, threads of this process with a latency of 10 ms                          |
| paged   | on this device; each token reads half of the weights from disk                          |
| counted | a small model with a simulated clock that counts what passes took on an idle machine    |

The model has the widths of GLM-4.7-Flash (2,048, 64 experts, 154,880 tokens), 8 of its 47 layers, and one draft layer.
Its weights are random, so a draft would be right only by chance. The draft layer computes each draft, and the benchmark
then replaces it: with the set probability by the token that the model will answer, else by another token. Of several
random sequences of right and wrong drafts it uses the one with which passes of the formula's number of rows yield the
mean number of tokens. Decoding is greedy. An answer ends after `--tokens` tokens, because its last passes have room for
few drafts. Each answer is compared with the answers without drafts before and after it; the median of all rounds
counts. `bests` compares the fastest answer of each side. Each probability has a conversation of its own, whose first
answer does not count because the drafter measures costs in it.

All answers use the tokens of the first answer without drafts, because the benchmark must know which drafts are right.
With random weights, two tokens often have nearly equal logits, and passes with several rows round differently: `others`
counts the tokens that the model would have chosen differently.

Two more sides use no drafts: `null` has a drafter that always chooses one row, and shows the cost of layers that are
prepared for drafts; `learning` is the first answer of each conversation, after the profiling at load time.

The formula's prediction uses costs that are measured in the same run (`mtp_costs.py`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_speculate import known_answer
from benchmarks.harness import GIB, Section, bench, parser_of, progress, table
from benchmarks.mtp_costs import busy_ms, draft_s, pass_s, predicted
from devices.probe import default_threads, own_rss
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine, VerifyResult
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models import synth
from edge.models.shapes import shape
from edge.parallel.engine import DistributedEngine
from edge.speculate.factory import MtpDraft, with_room
from edge.speculate.mtp import mtp_drafts, open_predictor
from edge.speculate.speculation import Speculation
from edge.speculate.windows import Shape
from partition.model.file import ModelFile
from partition.predict.drafts import MTP, ROWS
from tests.support.drafting import always
from tests.support.mtp import PROMPT, PassClock, plant, with_predictor
from tests.support.ranks_here import ranks_here

FLASH = shape(
    "deepseek2", layers=8, embd=2048, ff=10240, heads=20, head_size=256, vocab=154880, experts=64, experts_used=4,
    expert_ff=1536, dense_layers=1, predictors=1, context=2048,
)  # fmt: skip
TINY = replace(
    FLASH, layers=3, embd=64, ff=64, heads=4, head_size=16, vocab=320, experts=4, experts_used=2, expert_ff=32
)
RIGHT = (0.0, 0.5, 0.75, 0.9)
CONTEXT = 512
DELAYS_S = {"tensor": 5e-3, "stages": 10e-3}  # each way
COUNTED = {  # passes by their rows, and a draft, in passes of one row: measured on a quiet machine; 16 rows
    # are taken to be twice 8
    "one device": ({1: 1.0, 2: 1.71, 4: 2.69, 8: 6.07, 16: 12.0}, 0.535),
    "two tensor ranks": ({1: 1.0, 2: 1.24, 4: 1.61, 8: 2.75, 16: 5.5}, 0.21),
    "half paged": ({1: 1.0, 2: 1.0, 4: 2.06, 8: 3.91, 16: 7.8}, 0.12),
    "24 dense layers": ({1: 1.0, 2: 1.63, 4: 2.43, 8: 4.42, 16: 8.8}, 0.092),
}
LEAST, NEAR = 0.98, 0.1  # of plain; of the formula
_ANSWERS = 6  # of a conversation in counted time
_PROFILED = 40.0  # passes of one row: two seconds of 50 ms each


def main() -> None:
    """Measure what is asked for."""
    parser = parser_of(__doc__, ("one", "tensor", "stages", "paged", "counted"), rounds=3)
    parser.add_argument("--work", type=Path, help="folder for the model's file (default: a temporary one)")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    words = "on one device (default: all cores); with fewer than cores, what else runs disturbs less"
    parser.add_argument("--threads", type=int, default=default_threads(), help=words)
    sections = ("one", "tensor", "stages", "paged")
    counted_time = {"counted": Section(counted, counted_text)}
    bench(parser, {name: Section(partial(measured, name), text) for name in sections} | counted_time)


def measured(section: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Answers of one engine without drafts, and with some that are right with each probability."""
    work = args.work or folder.parent
    path = work / ("tiny-mtp.gguf" if args.tiny else "flash-mtp.gguf")
    if not path.exists():
        synth.synthesize(path, TINY if args.tiny else FLASH, "f32" if args.tiny else "q4_0")
    tokens, rounds = (8, 1) if args.tiny else (args.tokens, args.rounds)
    with engine_of(section, path, folder, args.threads) as engine, open_predictor(engine) as predictor:
        prompt, answer = known_answer(engine, tokens + ROWS[-1])
        passes = pass_s(engine, prompt, answer)
        drafted, taken_in = draft_s(engine, predictor, prompt, answer)
        busy = busy_ms(engine, prompt, answer) if isinstance(engine, DistributedEngine) and engine.stages > 1 else {}
        progress(f"passes by rows, s: {passes}; a draft {drafted:.4f} s, {taken_in:.4f}; busiest, ms: {busy}")
        compute = predictor.propose
        drafters = {right: Speculation(mtp_drafts(predictor, time.perf_counter), MTP) for right in RIGHT}
        idle = Speculation(mtp_drafts(predictor, time.perf_counter), MTP, choice=always(1))
        chosen = {right: Counter[Shape]() for right in RIGHT}
        formulas = {right: predicted(right, passes, drafted, busy, engine.stages, taken_in) for right in RIGHT}
        for right, drafter in drafters.items():
            progress(f"formula with {right:g} right: {formulas[right]}")
            if engine.paging is None:
                drafter.profile(engine)
            drafter.verified = partial(counted_rows, drafter.verified, chosen[right])  # type: ignore[method-assign]
        others = dict.fromkeys(RIGHT, 0)
        seeds = itertools.count()  # each answer has draws of its own: few are made where drafts do not pay
        counts = {right: np.zeros(2) for right in RIGHT}

        def plain(drafter: Speculation | None = None) -> float:
            return follow(engine, prompt, answer, drafter)[0]

        def with_drafts(right: float) -> float:
            predictor.propose = compute  # type: ignore[method-assign]
            rows = int(formulas[right]["predicted_rows"] * formulas[right]["predicted_windows"])
            plant(predictor, {tuple(prompt): answer}, right, next(seeds), rows)
            rate, n_others = follow(engine, prompt, answer, drafters[right])
            others[right] += n_others
            counts[right] += drafters[right].stats.accepted, drafters[right].stats.drafted
            return rate

        plain()  # with hidden states graphs are others, which are planned and learned first
        sides = {"null": partial(plain, idle)} | {str(right): partial(with_drafts, right) for right in RIGHT}
        plain_rates, rates, ratios = beside_plain(plain, sides, rounds + 1)
        learning = {name: each.pop(0) for name, each in ratios.items()}
        rows = []
        for right in RIGHT:
            accepted, of_drafts = counts[right].tolist()
            choice, each = drafters[right]._choices[1].rows, ratios[str(right)]
            rows.append(
                {
                    "right": right,
                    "learning_ratio": learning[str(right)],
                    "acceptance": accepted / of_drafts if of_drafts else None,
                    "costs": {str(size): choice.cost(size) for size in choice.measured_sizes()},
                    "chosen": {f"{n_rows} x {windows}": n for (n_rows, windows), n in sorted(chosen[right].items())},
                    "others": others[right],
                    **formulas[right],
                    "ratio": median(each),
                    "best_ratio": max(rates[str(right)][1:]) / max(plain_rates),
                    "least": min(each),
                    "most": max(each),
                }
            )
        return {
            "tokens": len(answer) - ROWS[-1],
            "plain_tokens_per_s": median(plain_rates),
            "null_ratio": median(ratios["null"]),
            "pass_ms": {str(size): 1e3 * seconds for size, seconds in passes.items()},
            "draft_ms": 1e3 * drafted,
            "taken_in_ms": 1e3 * taken_in,
            "rows": rows,
        }


def beside_plain(
    plain: Callable[[], float], sides: Mapping[str, Callable[[], float]], rounds: int
) -> tuple[list[float], dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens a second of plain answers, those of each side and round, and these in times of the plain ones
    before and behind it. A plain answer is behind each two sides, which take turns in going first."""
    names, plain_rates = [*sides], [plain()]
    rates, ratios = {name: list[float]() for name in sides}, {name: list[float]() for name in sides}
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for pair in (order[at : at + 2] for at in range(0, len(order), 2)):
            came = {name: sides[name]() for name in pair}
            plain_rates.append(plain())
            for name, rate in came.items():
                rates[name].append(rate)
                ratios[name].append(2 * rate / (plain_rates[-2] + plain_rates[-1]))
                progress(f"round {turn}, {name}: {rate:.2f} tokens a second, {ratios[name][-1]:.3f} of plain")
    return plain_rates, rates, ratios


def counted(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Answers in counted time: the first of a conversation, and later ones. Of each round other drafts are right."""
    path, tokens = with_predictor(folder, type_name="q8_0"), 24 if args.tiny else args.tokens
    options = EngineOptions(threads=1, context=CONTEXT, batch=64, outputs=ROWS[-1])
    requests = [Request([*PROMPT, i], tokens, SamplingParams(temperature=0), ends=False) for i in range(_ANSWERS)]
    rows = []
    for (side, (costs, one_draft_s)), right in itertools.product(COUNTED.items(), RIGHT):
        took: list[list[float]] = []
        for seed in range(args.rounds):
            with Engine(path, options) as engine, open_predictor(engine) as predictor:
                answers = [Scheduler(engine, slots=1, keep=True).run([request])[0] for request in requests]
                known = {tuple(request.prompt): answer for request, answer in zip(requests, answers, strict=True)}
                plant(predictor, known, right, seed)
                clock = PassClock(engine, predictor, costs, one_draft_s)
                drafter = Speculation(mtp_drafts(predictor, clock), MTP, clock=clock)
                if side != "half paged":
                    drafter.profile(engine, _PROFILED)
                took.append([])
                for request in requests:
                    began = clock.now
                    Scheduler(engine, slots=1, keep=True, drafter=drafter).run([request])
                    took[-1].append(clock.now - began - costs[ROWS[-1]])  # without the prompt
        first, *later = (tokens - 1) / np.array(took).T
        figures = {
            "first": float(np.mean(first)),
            "later": float(np.mean(later)),
            "least": float(np.min([first, *later])),
        }
        formula = predicted(right, costs, one_draft_s, {}, 1)
        rows.append({"side": side, "right": right, **figures, **formula})
    return {"tokens": tokens, "rows": rows}


def counted_text(section: dict[str, Any]) -> str:
    """The figures as Markdown."""
    header = ["side", "right", "first answer", "later", "least", "formula", "rows", "of the formula"]
    lines = [
        [
            row["side"],
            f"{row['right']:g}",
            *(f"{row[key]:.2f}" for key in ("first", "later", "least", "predicted_ratio")),
            str(row["predicted_rows"]),
            f"{row['later'] / row['predicted_ratio']:.2f}",
        ]
        for row in section["rows"]
    ]
    return f"Answers of {section['tokens']} tokens, in times of plain ones.\n\n{table(header, lines)}"


def follow(engine: TextEngine, prompt: list[int], answer: list[int], drafter: Speculation | None) -> tuple[float, int]:
    """Tokens a second after the first of an answer that is computed and chosen as ever, but has the tokens of a known
    one, and is left while there is room for drafts; and how many choices were others."""
    scheduler = Scheduler(engine, slots=1, keep=True, drafter=drafter)
    state = scheduler.prepare(Request(prompt, len(answer), SamplingParams(temperature=0), ends=False))
    continuation, others, came = state.continuation, 0, list[float]()
    choose = continuation._sampler.choose

    def chosen(logits: NDArray[np.float32], *, constrained: bool = True, may_end: bool = True) -> int:
        nonlocal others
        token = answer[len(continuation.tokens)]
        others += choose(logits, constrained=constrained, may_end=may_end) != token
        return token

    continuation._sampler.choose = chosen  # type: ignore[method-assign]
    if drafter is not None:
        drafter.begin()
    with scheduler:
        scheduler.enqueue(state)
        while len(came) <= len(answer) - ROWS[-1]:
            came += [time.perf_counter() for event in scheduler.step() if event.token_id is not None]
        scheduler.cancel(state.number)
    return (len(came) - 1) / (came[-1] - came[0]), others


def counted_rows(
    verified: Callable[[Sequence[VerifyResult]], None], chosen: Counter[Shape], results: Sequence[VerifyResult]
) -> None:
    """Count the rows of a pass and its windows, and let the drafter learn."""
    chosen[results[0].rows, results[0].windows] += 1
    verified(results)


@contextmanager
def engine_of(section: str, path: Path, folder: Path, threads: int) -> Iterator[TextEngine]:
    """The engine of a section, with room for drafts. threads: of one device."""
    if section in DELAYS_S:
        options = with_room(EngineOptions(threads=1, context=CONTEXT, batch=64), MtpDraft(ModelFile.open(path)))
        how = {"parallel": "tensor" if section == "tensor" else "pipeline", "shares": (1, 1)}
        with ranks_here(path, how, options, folder, delay_s=DELAYS_S[section]) as ranks:
            yield ranks
        return
    options = EngineOptions(threads=threads, context=CONTEXT, batch=64)
    if section == "paged":
        options = with_room(replace(options, memory=own_rss() + 16 * GIB), MtpDraft(ModelFile.open(path)))
        with Engine(path, options) as whole:
            options = replace(options, memory=whole.memory.total - path.stat().st_size // 2)
    with Engine(path, with_room(options, MtpDraft(ModelFile.open(path))) if section == "one" else options) as engine:
        yield engine


def text(section: dict[str, Any]) -> str:
    """The figures as Markdown."""
    one_row_ms = section["pass_ms"]["1"]
    passes = ", ".join(f"{rows}: {ms / one_row_ms:.2f}" for rows, ms in section["pass_ms"].items())
    lines = [
        [
            f"{row['right']:g}",
            "" if row["acceptance"] is None else f"{row['acceptance']:.2f}",
            ", ".join(f"{rows}: {cost:.2f}" for rows, cost in row["costs"].items()),
            ", ".join(f"{shape}: {n}" for shape, n in row["chosen"].items()),
            *(f"{row[key]:.2f}" for key in ("learning_ratio", "ratio", "least", "most", "best_ratio")),
            f"{row['predicted_ratio']:.2f}",
            f"{row['predicted_rows']} x {row['predicted_windows']}",
            f"{row['ratio'] / row['predicted_ratio']:.2f}",
            str(row["others"]),
        ]
        for row in section["rows"]
    ]
    header = ["right", "acceptance", "costs as learned", "passes", "learning", "of plain", "least", "most", "bests"]
    return "\n\n".join(
        [
            f"{section['tokens']} tokens, {section['plain_tokens_per_s']:.2f} a second without drafts; a pass of"
            f" {one_row_ms:.1f} ms, by rows {passes}; a draft of {section['draft_ms']:.1f} ms, and"
            f" {section['taken_in_ms']:.1f} for each token of the pass before but one. With layers that never draft:"
            f" {section['null_ratio']:.3f} of plain.",
            table([*header, "formula", "rows x windows", "of the formula", "others"], lines),
            f"Asked: of plain at least {LEAST}, of the formula within {NEAR:.0%}.",
        ]
    )


if __name__ == "__main__":
    main()
