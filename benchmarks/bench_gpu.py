"""A memory budget on a GPU compared with llama.cpp's own offload; and a GPU and the processor as two stages.

    python benchmarks/bench_gpu.py [--only budget|prompts|experts|stages] [--work DIR] [--model NAME] [--json [FILE]]

| section | question                                                                                          |
| budget  | does a process ever use more GPU memory than --gpu-memory?                                        |
| prompts | how long do a prompt of 512 tokens and a token take, compared with llama.cpp's offload in the     |
|         | same number of bytes?                                                                             |
| experts | the same for a model with experts (a quarter of qwen3-30b-a3b), compared with llama.cpp's        |
|         | --n-cpu-moe in the same number of bytes                                                           |
| stages  | eight answers at once: is one process with layers on the GPU and the processor or are two stages  |
|         | faster?                                                                                           |

llama.cpp keeps as many layers on the GPU as its dry run finds, and for a prompt it copies each matrix of the other
layers there, from the mapped file or from page-locked memory (`--no-mmap`). Our streamed layers pass through two
buffers. Each side is a process of its own, which computes once before the measurement. Needs a llama.cpp that was built
for a GPU (LLAMA_CPP_LIB_PATH).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.gpu_side import EXPERTS, LOCKED, PLACED, SIZES, STREAMED
from benchmarks.harness import (
    MIB,
    ROOT,
    Figures,
    LeftOut,
    Section,
    alternate,
    bench,
    bests,
    compared,
    medians,
    parser_of,
    ratio_text,
    table,
)
from benchmarks.lent_device import Worker
from benchmarks.paging_runs import MODELS, Models
from benchmarks.serve_clients import Words
from benchmarks.serve_loads import at_once, completion
from benchmarks.servers import Server, edge_serve, running
from edge.llama import ggml, llama
from edge.llama.buffers import Device
from edge.models.demo import MODEL_PATH
from edge.weights import memory
from edge.weights.gpu_layers import layer_sizes
from edge.weights.gpu_parts import PRODUCTS, fixed_parts
from edge.weights.on_gpu import layers_of
from partition.model.file import ModelFile
from partition.model.model import ModelShape

SIDE = Path(__file__).with_name("gpu_side.py")
RUN_S = 300.0
EXPERT_SHARES = (0.0, 0.4, 0.8)  # of the experts, that the budget has room for
SHARES = (0.25, 0.5)  # of the layers, that the budget has room for beside the buffers
RUNS = 10
TIMES = ("prompt_s", "token_s", "peak_bytes")
IN_BUDGET = ("budget_bytes", "account_bytes", "peak_bytes", "streamed")
MAPPED = "llama.cpp, mapped"
STREAMS, ANSWER, PROMPT = 8, 48, 16  # requests at once; tokens
ONE, TWO = "one process", "two stages"


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--model", choices=list(MODELS), default="8b", help="whose shape (default: 8b)")
    parser.add_argument("--threads", type=int, default=7, help="of the processor in `stages` (default: 7)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> Figures:
    """The model file."""
    if args.tiny:
        args.path = MODEL_PATH
    else:
        work = args.work or folder / "models"
        work.mkdir(parents=True, exist_ok=True)
        args.path = Models(work, keep=True)(args.model)
    return {"gpu": [ggml.device_name(gpu) for gpu in ggml.gpu_devices()], "file_bytes": args.path.stat().st_size}


def needs_gpu() -> None:
    """Leave the section out where there is no GPU."""
    if not llama.has_gpu():
        raise LeftOut("this build of llama.cpp finds no GPU")


def side(path: Path, how: str, amount: int, figures: Sequence[str] = TIMES) -> dict[str, float]:
    """Return what a process of its own measures. amount: bytes of a budget, or layers."""
    done = subprocess.run(
        [sys.executable, str(SIDE), str(path), how, str(amount)],
        stdout=subprocess.PIPE, timeout=RUN_S, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the process of {how} {amount} ended with {done.returncode}; its last words are above")
    measured = json.loads(done.stdout)
    return {key: measured[key] for key in figures}


class Account:
    """Parts of the GPU's memory that a model takes."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, ModelFile.open(path)
        self.shape = ModelShape.from_gguf(self._file)
        self._name = Device(ggml.gpu_devices()[0]).buffer_name
        self._parts = self._fixed(-1)

    def _fixed(self, layers: int) -> dict[str, int]:
        return fixed_parts(self._file, SIZES, memory.dry_run(self._path, SIZES, layers)[1], self._name)

    def budget(self, share: float) -> int:
        """Bytes in which a share of the layers stays, beside two buffers and everything else."""
        return sum(self._parts.values()) + round((share + 2 / self.shape.n_layers) * sum(self.shape.layer_bytes))

    def layers(self, budget: int) -> int:
        """Layers, the head counted as one, that llama.cpp's own offload has in the same bytes."""
        sizes, fit = layer_sizes(self.shape, SIZES), 0
        for layers in range(1, self.shape.n_layers + 2):
            parts = self._fixed(layers)
            if sum(sizes[:layers]) + parts["compute buffers"] + parts[PRODUCTS] <= budget:
                fit = layers
        return fit


# --- never passed ---


def budget(_: Path, args: argparse.Namespace) -> Figures:
    """The peak of several runs at several budgets."""
    needs_gpu()
    account = Account(args.path)
    runs = args.rounds or (2 if args.tiny else RUNS)
    shares = [0.05 + 0.9 * i / max(1, runs - 1) for i in range(runs)]
    return {"runs": [side(args.path, STREAMED, account.budget(share), IN_BUDGET) for share in shares]}


def show_budget(figures: Figures) -> str:
    return table(
        ["budget, MiB", "account, MiB", "peak, MiB", "layers that pass through"],
        [
            [f"{run[key] / MIB:,.1f}" for key in ("budget_bytes", "account_bytes", "peak_bytes")]
            + [f"{run['streamed']:g}"]
            for run in figures["runs"]
        ],
    )


# --- prompts ---


def prompts(_: Path, args: argparse.Namespace) -> Figures:
    """Seconds of a prompt and of a token, by share."""
    needs_gpu()
    account = Account(args.path)
    result: Figures = {}
    for share in SHARES:
        size = account.budget(share)
        fit = account.layers(size)
        sides = {how: partial(side, args.path, how, fit) for how in (MAPPED, LOCKED)}
        sides[STREAMED] = partial(side, args.path, STREAMED, size)
        rounds = alternate(sides, args.rounds or (1 if args.tiny else 3), warm_up=False)
        result[f"{share:g}"] = {
            "budget_bytes": size,
            "layers": fit,
            "of": account.shape.n_layers + 1,
            "medians": medians(rounds),
            "bests": bests(rounds),
            "compared": [row for how in (MAPPED, LOCKED) for row in compared(rounds, STREAMED, how)],
        }
    return {"shares": result}


def show_prompts(figures: Figures) -> str:
    lines = []
    for item in figures["shares"].values():
        for how, best in item["bests"].items():
            ratios = [
                ratio_text(row)
                for key in ("prompt_s", "token_s")
                for row in item["compared"]
                if row["beside"] == how and row["figure"] == key
            ]
            layers = "" if how == STREAMED else f"{item['layers']} of {item['of']}"
            lines.append(
                [how, f"{item['budget_bytes'] / MIB:,.0f}", layers, f"{best['peak_bytes'] / MIB:,.0f}"]
                + [f"{best[key] * 1e3:.1f}" for key in ("prompt_s", "token_s")]
                + ratios
            )
    header = [
        "",
        "budget, MiB",
        "layers",
        "peak, MiB",
        "prompt, ms",
        "token, ms",
        "prompt: streamed",
        "token: streamed",
    ]
    return table(header, lines)


# --- experts ---


def experts(folder: Path, args: argparse.Namespace) -> Figures:
    """Seconds of a prompt and of a token of a model with experts, by the share of its experts that fits on the GPU."""
    needs_gpu()
    path = Models(args.work or folder, keep=True)("tiny-moe" if args.tiny else "moe")
    file = ModelFile.open(path)
    name = Device(ggml.gpu_devices()[0]).buffer_name
    parts = fixed_parts(file, SIZES, memory.dry_run(path, SIZES, -1)[1], name)
    layers = layers_of(file, SIZES, parts["KV cache"])
    dense = sum(layer.dense for layer in layers)
    result: Figures = {}
    for share in EXPERT_SHARES:
        size = sum(parts.values()) + dense + round(share * sum(layer.experts for layer in layers))
        # As many layers' experts as fit, in the same bytes.
        fit, room = 0, size - sum(parts.values()) - dense
        while fit < len(layers) and sum(layer.experts for layer in layers[-fit - 1 :]) <= room:
            fit += 1
        sides = {
            EXPERTS: partial(side, path, EXPERTS, len(layers) - fit),
            PLACED: partial(side, path, PLACED, size),
        }
        rounds = alternate(sides, args.rounds or (1 if args.tiny else 3), warm_up=False)
        result[f"{share:g}"] = {
            "budget_bytes": size,
            "layers": fit,
            "of": len(layers),
            "medians": medians(rounds),
            "bests": bests(rounds),
            "compared": compared(rounds, PLACED, EXPERTS),
        }
    return {"shares": result}


def show_experts(figures: Figures) -> str:
    lines = [
        [how, f"{item['budget_bytes'] / MIB:,.0f}", f"{item['layers']} of {item['of']}"]
        + [f"{best['peak_bytes'] / MIB:,.0f}"]
        + [f"{best[key] * 1e3:.1f}" for key in ("prompt_s", "token_s")]
        + [ratio_text(row) for row in item["compared"] if how == EXPERTS and row["figure"] != "peak_bytes"]
        for item in figures["shares"].values()
        for how, best in item["bests"].items()
    ]
    header = ["", "budget, MiB", "layers' experts on the GPU", "peak, MiB", "prompt, ms", "token, ms"]
    return table([*header, "prompt: placed", "token: placed"], [[*line, "", ""][: len(header) + 2] for line in lines])


# --- the processor as a stage ---


def stages(folder: Path, args: argparse.Namespace) -> Figures:
    """Tokens a second of eight answers at once, by the number of layers on the GPU."""
    needs_gpu()
    file = ModelFile.open(args.path)
    shape, words = ModelShape.from_gguf(file), Words(args.path)
    # A random model says the token that ends a text as rarely as any other; the bundled one must not say it.
    ends = [int(file.metadata["tokenizer.ggml.eos_token_id"])] if args.tiny else []
    result: Figures = {}
    for share in (0.5,) if args.tiny else (0.5, 0.9):
        layers = round(share * shape.n_layers)
        with ExitStack() as closing:
            worker = Worker(folder / f"worker-{layers}", threads=1, more=("--gpu-layers", "999"))
            worker.start()
            closing.callback(worker.end)
            serve = partial(edge_serve, args.path, folder, context=256, requests=STREAMS)
            cut = (
                "--workers", worker.wait(), "--parallel", "pipeline", "--gpu-layers", "0",
                "--shares", f"{shape.n_layers - layers},{layers}",
            )  # fmt: skip
            servers = {
                ONE: serve(threads=args.threads + 1, more=("--gpu-layers", str(layers + 1))),
                TWO: serve(threads=args.threads, more=cut),
            }
            with running(servers):
                rounds = alternate(
                    {name: partial(answered, server, words, ends) for name, server in servers.items()},
                    args.rounds or (1 if args.tiny else 3),
                )
        result[f"{layers}"] = {
            "medians": medians(rounds),
            "bests": bests(rounds),
            "compared": compared(rounds, TWO, ONE),
        }
    return {"layers": result, "of": shape.n_layers}


def answered(server: Server, words: Words, ends: list[int]) -> dict[str, float]:
    bodies = [completion(server, words.text(PROMPT), ANSWER, ends) for _ in range(STREAMS)]
    return asyncio.run(at_once(server, bodies))


def show_stages(figures: Figures) -> str:
    return table(
        ["layers on the GPU", f"{ONE}, tokens/s", f"{TWO}, tokens/s", "ratio"],
        [
            [f"{layers} of {figures['of']}"]
            + [f"{item['bests'][name]['decode_per_s']:.1f}" for name in (ONE, TWO)]
            + [ratio_text(row) for row in item["compared"] if row["figure"] == "decode_per_s"]
            for layers, item in figures["layers"].items()
        ],
    )


SECTIONS = {
    "budget": Section(budget, show_budget),
    "prompts": Section(prompts, show_prompts),
    "experts": Section(experts, show_experts),
    "stages": Section(stages, show_stages),
}

if __name__ == "__main__":
    main()
