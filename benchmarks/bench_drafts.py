"""Speculative decoding with trained weights: acceptance and speed-up of each draft source on three kinds of text.

    python benchmarks/bench_drafts.py [--model FILE] [--only SECTION] [--rounds 3] [--tokens 160] [--json [FILE]]

| section  | where the target model runs                                                    |
| resident | on this device, with one thread and all weights in memory                      |
| far      | on two tensor-parallel ranks, threads of this process with a latency of 5 ms   |
| paged    | on this device, with all cores; each token reads half of the weights from disk |

Texts: a function that the model repeats with one change (`code`), an article that it summarizes with quotations
(`quotes`), and a free story (`story`). Draft sources: `ngram` (prompt lookup), `self` (the same model with fewer bits,
as `--draft self` makes it), and `q4_1` (the smaller file from which the model was made, as a separate draft model).

The model is SmolLM2-135M-Instruct, dequantized to F16 so that it can be quantized to smaller types; --model selects
another one. Decoding is greedy. One engine computes answers with and without a draft source in turn. Each source has a
conversation of its own, whose first answer does not count because the drafter measures the cost of passes in it.
Acceptance is the fraction of drafted tokens that was accepted. `resident` measures processor time of its one thread,
which other work on the machine changes little; the drafter uses the same clock. The other sections wait for links and
disks, so they measure elapsed time. A speed-up is a ratio of medians; the tables also show the smallest and the largest
ratio of all rounds. `best` compares the fastest answer of each side, which other work disturbs least. `within` is the
gain that the answer itself reports (`SpeculationStats.gain`), relative to its own passes with one row, so that slow
moments affect both sides. `same` states whether all answers have the tokens of the answers without drafts: passes with
several rows differ in the last bits, so a near tie can be decided differently.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import GIB, STDOUT, alternate, compared, environment, run_section, write_json
from devices.probe import default_threads, own_rss
from edge.errors import EngineError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from edge.quantization.gguf import quantize
from edge.speculate.factory import Draft, drafts, speculation, with_room
from edge.speculate.speculation import Speculation
from edge.text.templates.process import TemplateProcess
from partition.model.file import ModelFile
from partition.predict.drafts import SELF
from quant.mixes import mix_by_name
from tests.real.weights import SMOLLM2
from tests.support.ranks_here import ranks_here

SECTIONS = ("resident", "far", "paged")
DELAY_S = 5e-3  # each way, between ranks
CONTEXT = 1024
LEAST = 0.98  # of the speed without drafts: asked of every source on every text

_FUNCTION = '''def running_mean(values, width):
    """Return the mean of each window of `width` values."""
    if width < 1:
        raise ValueError("width must be at least 1")
    total = sum(values[:width])
    means = [total / width]
    for i in range(width, len(values)):
        total += values[i] - values[i - width]
        means.append(total / width)
    return means'''
_ARTICLE = """The lighthouse at Cape Arden was built in 1871 by masons who came from the quarries of the north. Its lamp
burned whale oil, later paraffin, and from 1926 on electric light. "A keeper never sleeps when the fog is in," wrote
Hannah Reed, who kept the light for thirty-one years. In the winter of 1909 she rowed out four times in one night and
brought back eleven sailors from the wreck of the Corinna. The lamp was made automatic in 1983. Today the tower belongs
to the town, which opens it to visitors from May to September. Last year 14,000 people climbed its 213 steps."""
QUESTIONS = {
    "code": f"Give back this Python function with the name `means` changed to `result`, and nothing else:\n\n"
    f"```python\n{_FUNCTION}\n```",
    "quotes": f"Sum up this article in three sentences, and quote from it word for word:\n\n{_ARTICLE}",
    "story": "Tell a story about a young baker who finds a map in a loaf of bread.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--model", type=Path, help="a GGUF file of 8 bits or more a weight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--tiny", action="store_true", help="the bundled model and short answers, to see that it works")
    parser.add_argument("--json", nargs="?", const=STDOUT, help="write the figures to FILE, or print them")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.rounds, args.tokens = MODEL_PATH, 1, 8
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, sources = _sources(args.model, folder)
        result: dict[str, Any] = {**environment(), "model": model.name, "tokens": args.tokens, "rounds": args.rounds}
        for section in [args.only] if args.only else SECTIONS:
            run = partial(measure, section, model, sources, folder, args.tokens, args.rounds)
            result[section] = run_section(section, run, table, args.json)
        write_json(result, args.json)


def _sources(provided: Path | None, folder: Path) -> tuple[Path, dict[str, Draft]]:
    """The model that verifies, and what may draft for it, by name."""
    sources: dict[str, Draft] = {"ngram": "ngram"}
    model = provided
    if model is None:
        model = folder / "smollm2-135m-f16.gguf"
        quantize(ModelFile.open(SMOLLM2.path()), model, mix_by_name("f16"))
        sources["q4_1"] = ModelFile.open(SMOLLM2.path())
    with suppress(EngineError):  # it has so few bits that nothing is much smaller
        sources["self"] = drafts(SELF, ModelFile.open(model))
    return model, sources


@contextmanager
def engine_of(section: str, model: Path, draft: Draft, folder: Path) -> Iterator[TextEngine]:
    """The engine of a section, with room for a draft source."""
    threads = default_threads() if section == "paged" else 1
    options = EngineOptions(threads=threads, context=CONTEXT)
    if section == "far":
        how = {"parallel": "tensor", "shares": (1, 1)}
        roomy = with_room(EngineOptions(threads=1, context=CONTEXT, batch=64), draft)
        with ranks_here(model, how, roomy, folder, delay_s=DELAY_S) as ranks:
            yield ranks
        return
    if section == "paged":
        with Engine(model, EngineOptions(threads=threads, context=CONTEXT, memory=own_rss() + 2 * GIB)) as whole:
            memory = whole.memory.total - model.stat().st_size // 2
        options = EngineOptions(threads=threads, context=CONTEXT, memory=memory)
    with Engine(model, with_room(options, draft)) as engine:
        yield engine


def measure(
    section: str, model: Path, sources: dict[str, Draft], folder: Path, tokens: int, rounds: int
) -> dict[str, Any]:
    """Answers to each question with each draft source, beside answers without."""
    rows: list[dict[str, Any]] = []
    clock = time.process_time if section == "resident" else time.perf_counter
    for name, draft in sources.items():
        with engine_of(section, model, draft, folder) as engine, ExitStack() as stack:
            for text, question in QUESTIONS.items():
                drafter = speculation(draft, engine, stack.enter_context, clock=clock)
                assert drafter is not None
                figures = beside_plain(engine, drafter, question, tokens, rounds, clock)
                rows.append({"draft": name, "text": text, **figures})
    return {"rows": rows}


def beside_plain(
    engine: TextEngine, drafter: Speculation, question: str, tokens: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Answers to one question, with drafts and without in turn."""
    renderer = TemplateProcess()
    answers: dict[bool, list[int]] = {}
    drafted = accepted = rows = passes = 0
    is_same = True
    gains: list[float] = []

    def answer(*, with_drafts: bool) -> dict[str, float]:
        nonlocal drafted, accepted, rows, passes, is_same
        greedy = SamplingParams(temperature=0, allow_repetition=True)
        chat = Chat(engine, renderer=renderer, drafter=drafter if with_drafts else None)
        responses, times = [], []
        for response in chat.ask(question, greedy, max_tokens=tokens):
            responses.append(response)
            times.append(clock())
        answers[with_drafts] = [item.token_id for item in responses if item.token_id is not None]
        if with_drafts:
            stats = drafter.stats
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
            rows, passes = rows + stats.rows, passes + stats.passes
            gains.append(stats.gain or 1.0)
            is_same &= answers[True] == answers[False]
        return {"tokens_per_s": (len(answers[with_drafts]) - 1) / (times[-2] - times[0])}  # after the first

    sides: dict[str, Callable[[], dict[str, float]]] = {
        "plain": partial(answer, with_drafts=False),
        "drafted": partial(answer, with_drafts=True),
    }
    answer(with_drafts=False)  # to compare with, whoever goes first
    figures = alternate(sides, rounds)
    renderer.close()
    [ratio] = compared(figures, "drafted", "plain")
    return {
        "tokens": len(answers[False]),
        "acceptance": accepted / drafted if drafted else None,
        "rows_per_pass": rows / passes if passes else None,
        "plain_tokens_per_s": median(item["tokens_per_s"] for item in figures["plain"]),
        "tokens_per_s": median(item["tokens_per_s"] for item in figures["drafted"]),
        **{key: ratio[key] for key in ("ratio", "least", "most")},
        "within": median(gains[1:]),  # as of all figures, the first is not counted
        "best": max(item["tokens_per_s"] for item in figures["drafted"])
        / max(item["tokens_per_s"] for item in figures["plain"]),
        "same": is_same,
    }


def table(section: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "| draft | text | acceptance | rows a pass | tokens/s without | with | speed-up | least | most | best |"
        " within | same |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in section["rows"]:
        acceptance = "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        figures: Sequence[float] = [row[key] for key in ("plain_tokens_per_s", "tokens_per_s")]
        ratios = " | ".join(f"{row[key]:.2f}" for key in ("ratio", "least", "most", "best", "within"))
        lines.append(
            f"| {row['draft']} | {row['text']} | {acceptance} | {row['rows_per_pass'] or 0:.1f} |"
            f" {' | '.join(f'{rate:.1f}' for rate in figures)} | {ratios} | {'yes' if row['same'] else 'no'} |"
        )
    worst, within = (min(row[key] for row in section["rows"]) for key in ("ratio", "within"))
    end = f"The least speed-up is {worst:.2f}, {within:.2f} within answers; asked is at least {LEAST}."
    return "\n".join([*lines, "", end])


if __name__ == "__main__":
    main()
