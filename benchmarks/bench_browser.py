"""A browser's page as a device: its speed, predictions of it, its results beside other devices, and tabs that close.

    python benchmarks/bench_browser.py [--only speed|predicted|same|closed] [--model FILE] [--rounds 5]
        [--closings 50] [--json [FILE]] [--tiny]

| section   | question                                                                                               |
| speed     | how fast is Chromium compared with node, and how much does a second thread gain compared with          |
|           | llama.cpp as a native program? All compute the same file with the same options                         |
| predicted | how far are the planner's decode time, prefill time and memory of the page from the measured ones?     |
| same      | how far are the logits of stages on this device, Chromium and a native worker from one device's?       |
| closed    | what happens when the tab is closed, or its process ends, in the middle of an answer, and comes back?  |

The pages join a bridge on loopback as those of users do, and compute the whole file. The default model has the shape of
SmolLM2-360M in Q4_0, with random weights. Greedy tokens follow a prompt of 128 tokens. Chromium and node run the same
WebAssembly. The page of `predicted` has one thread. "Estimated" is what first plans use, from figures
that the bridge measures when a page joins. "Surveyed" is what `edge plan` uses after layers were timed at the page.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.browser_stages import THREADS, closed, closed_text, joined, same, same_text
from benchmarks.harness import (
    MIB,
    Figures,
    Rounds,
    Section,
    alternate,
    bench,
    compared,
    medians,
    parser_of,
    ratio_text,
    table,
)
from edge.browser.engine import PageEngine
from edge.browser.profile import PageProfile
from edge.cluster.fleet import Fleet
from edge.llm.engine import ModelRunner
from edge.llm.options import EngineOptions
from edge.models import synth
from edge.models.demo import MODEL_PATH
from edge.planning.arrange import work_of
from edge.profiling.llm_survey import Estimator, llm_survey
from edge.profiling.survey import Survey
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.predict import predict
from partition.predict.speeds import DeviceSpeed
from partition.slices.gguf_slice import limits
from tests.support.bridge_process import Bridge, running_bridge

SHAPE = "smollm2-360m"
PROMPT, TOKENS = 128, 24
OPTIONS = EngineOptions(context=512, threads=THREADS, flash_attention="on")
ASKED_SPEED, ASKED_GAIN, ASKED_ERROR = 0.9, 0.9, 0.15
FIGURES = {"token_s": "a greedy token", "prefill_tokens_per_s": f"prompt of {PROMPT} tokens"}


def prepare(folder: Path, args: argparse.Namespace) -> Figures:
    """Write the model."""
    args.rounds, args.closings = (1, 2) if args.tiny else (args.rounds, args.closings)
    if args.model is None and args.tiny:
        args.model = MODEL_PATH
    elif args.model is None:
        args.model = folder / f"{SHAPE}.gguf"
        synth.synthesize(args.model, synth.SHAPES[SHAPE], "q4_0")
    return {"model": args.model.name}


# --- pages ---


def at_page(bridge: Bridge, kind: str, file: ModelFile) -> PageEngine:
    """Return an engine at a page."""
    folder = bridge.folder(kind)
    return PageEngine(file, OPTIONS, folder, PageProfile.load(folder).memory_bytes, (), None, embeddings=False)


def generation(engine: ModelRunner, threads: int) -> dict[str, float]:
    """Compute a prompt and greedy tokens. Return the median time of a token and the rate of the prompt."""
    engine._context.use_threads(threads)
    engine.use_top(1)
    engine.kv_clear()
    rows = engine.rows
    rows.tokens[:PROMPT] = np.random.default_rng(1).integers(3, engine.model.n_vocab, PROMPT)
    rows.positions[:PROMPT], rows.sequences[:PROMPT], rows.outputs[:PROMPT] = range(PROMPT), 0, 0
    rows.outputs[PROMPT - 1] = 1
    began = time.perf_counter()
    engine.decode_rows(rows, PROMPT)
    token = int(engine.logits(PROMPT - 1).argmax())
    times = [time.perf_counter() - began]
    for position in range(PROMPT, PROMPT + TOKENS):
        rows.tokens[0], rows.positions[0], rows.outputs[0] = token, position, 1
        began = time.perf_counter()
        engine.decode_rows(rows, 1)
        token = int(engine.logits(0).argmax())
        times.append(time.perf_counter() - began)
    return {"token_s": statistics.median(times[1:]), "prefill_tokens_per_s": PROMPT / times[0]}


# --- speed ---


def speed(folder: Path, args: argparse.Namespace) -> Figures:
    """Measure Chromium, node and the native program with one and two threads in turn."""
    file = ModelFile.open(args.model)
    with ExitStack() as closing:
        bridge = closing.enter_context(running_bridge(folder, check=True))
        engines: dict[str, ModelRunner] = {"native": closing.enter_context(ModelRunner(file, OPTIONS))}
        for kind in ("chromium", "node"):
            closing.enter_context(joined(bridge, folder, kind, THREADS))
            engines[kind] = closing.enter_context(at_page(bridge, kind, file))
        trips_s = {kind: PageProfile.load(bridge.folder(kind)).round_trip_s for kind in engines if kind != "native"}
        sides = {
            f"{kind}, {n}": partial(generation, engine, n) for n in (1, THREADS) for kind, engine in engines.items()
        }
        rounds = alternate(sides, args.rounds)
    gains = {kind: gain_of(rounds, kind) for kind in engines}
    return {
        "median": medians(rounds),
        "of_node": compared(rounds, "chromium, 1", "node, 1"),
        "gains": gains,
        "of_native_gain": {
            kind: {key: value / gains["native"][key] for key, value in gains[kind].items()} for kind in trips_s
        },
        "round_trip_s": trips_s,
        "rounds": rounds,
    }


def gain_of(rounds: Rounds, kind: str) -> dict[str, float]:
    """Return how many times as fast two threads are, by figure."""
    return {row["figure"]: row["ratio"] for row in compared(rounds, f"{kind}, {THREADS}", f"{kind}, 1")}


def speed_text(figures: Figures) -> str:
    lines = [
        [
            f"{kind}, {label}",
            *(shown(key, figures["median"][f"{kind}, {n}"][key]) for n in (1, THREADS)),
            f"{gains[key]:.3f}",
            f"{figures['of_native_gain'][kind][key]:.3f}" if kind in figures["of_native_gain"] else "",
        ]
        for key, label in FIGURES.items()
        for kind, gains in figures["gains"].items()
    ]
    header = ["", "1 thread", f"{THREADS} threads", "gain", f"of the native gain (asked: {ASKED_GAIN})"]
    ratios = ", ".join(f"{FIGURES[row['figure']]} {ratio_text(row)}" for row in figures["of_node"])
    trips = ", ".join(f"{kind} {1e3 * trip_s:.1f} ms" for kind, trip_s in figures["round_trip_s"].items())
    return (
        f"{table(header, lines)}\n\nSpeed of Chromium, of node, one thread: {ratios}; asked: {ASKED_SPEED}. Round trip"
        f" from the bridge to the page: {trips}."
    )


def shown(key: str, value: float) -> str:
    return f"{1e3 * value:.2f} ms" if key == "token_s" else f"{value:.2f} tokens/s"


# --- predicted ---


def predicted(folder: Path, args: argparse.Namespace) -> Figures:
    """Predict the page's figures, then measure them."""
    file = ModelFile.open(args.model)
    with running_bridge(folder, check=True) as bridge, joined(bridge, folder, "chromium", 1) as page:
        assert page is not None
        address = f"127.0.0.1:{bridge.port('chromium')}"
        with Fleet([address]) as fleet:
            surveys = {
                "estimated": Estimator(fleet).survey(file, remembered=False),
                "surveyed": llm_survey(fleet, file, "0" * 64, fresh=True),
            }
        with at_page(bridge, "chromium", file) as engine:
            rounds = alternate({"measured": partial(generation, engine, 1)}, args.rounds)
            heap = re.match(r"\d+", page.value("document.getElementById('memory').textContent"))
    assert heap is not None
    measured: dict[str, float] = {**medians(rounds)["measured"], "memory_bytes": MIB * float(heap[0])}
    figures = {name: prediction(survey, file, address) for name, survey in surveys.items()}
    errors = {
        name: {key: value / measured[key] - 1 for key, value in values.items()} for name, values in figures.items()
    }
    return {"measured": measured, **figures, "errors": errors}


def prediction(survey: Survey[DeviceSpeed], file: ModelFile, address: str) -> dict[str, float]:
    """Return the planner's figures for a page that computes all layers and the head."""
    plan = make_plan(limits(file), file.path.stem, "", [LOCAL, address], "pipeline", (0, 1))
    work = work_of(file, OPTIONS, prompt=PROMPT, depth=PROMPT + TOKENS // 2)
    stage = predict(plan, work, {speed.device: speed for speed in survey.speeds}, survey.links).stages[1]
    rate = PROMPT / stage.rows_s.at(PROMPT)
    return {"token_s": stage.compute_s, "prefill_tokens_per_s": rate, "memory_bytes": stage.memory_bytes[address]}


def predicted_text(figures: Figures) -> str:
    def cell(values: Mapping[str, float], key: str) -> str:
        return f"{values[key] / MIB:.0f} MiB" if key == "memory_bytes" else shown(key, values[key])

    names = ("estimated", "surveyed")
    lines = [
        [label, cell(figures["measured"], key)]
        + [f"{cell(figures[name], key)} ({figures['errors'][name][key]:+.0%})" for name in names]
        for key, label in {**FIGURES, "memory_bytes": "memory"}.items()
    ]
    return f"{table(['', 'measured', *names], lines)}\n\nAsked: an error of {ASKED_ERROR:.0%} at most."


SECTIONS = {
    "speed": Section(speed, speed_text),
    "predicted": Section(predicted, predicted_text),
    "same": Section(same, same_text),
    "closed": Section(closed, closed_text),
}

if __name__ == "__main__":
    parser = parser_of(__doc__, SECTIONS, rounds=5)
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--closings", type=int, default=50, help="times that the tab is closed")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which it is closed")
    bench(parser, SECTIONS, prepare)
