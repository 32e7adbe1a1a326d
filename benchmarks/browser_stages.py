"""Stages of a model on this device, in a tab of Chromium and on a native worker, for bench_browser.py."""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import Figures, LeftOut, progress, table
from edge.bridge.page import LOST_S
from edge.deployment.deployed import DeployedModel
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from tests.support.bridge_process import Bridge, running_bridge
from tests.support.browser import NAMES, Page, browser
from tests.support.deployments import ONE_THREAD, Floats, Heard, own_folders, supervised
from tests.support.helpers import until
from tests.support.page_bridge import node_page
from tests.support.workers import worker

THREADS = 2
JOIN_S = 180.0  # this and the next: only against a hang
BACK_S = 120.0
ROWS = 64  # positions whose logits are compared
ANSWER_TOKENS = 24
QUESTION = "What is the capital of France, and what is it known for?"
OPTIONS = EngineOptions(context=512, batch=64, threads=1)


@contextmanager
def joined(bridge: Bridge, folder: Path, kind: str, threads: int) -> Iterator[Page | None]:
    """Yield Chromium's page, or None for node, once the page has joined and its worker answers."""
    url, token = bridge.url, bridge.browsers.invite(kind, 600)
    program = next(filter(None, map(shutil.which, NAMES if kind == "chromium" else ("node",))), None)
    if program is None:
        raise LeftOut(f"it needs {kind}, which is not installed")
    with ExitStack() as closing:
        page = None
        if kind == "node":
            closing.enter_context(node_page(program, url, folder / "store", threads=threads, token=token))
        else:
            page = closing.enter_context(browser(folder / "chromium"))
            page.call("Network.disable")  # reporting each request takes time
            page.call("Emulation.setHardwareConcurrencyOverride", hardwareConcurrency=threads)
            page.call("Page.navigate", url=f"{url}/#{token}")
        until_joined(bridge, kind)
        yield page


def until_joined(bridge: Bridge, kind: str) -> None:
    until(lambda: bridge.is_ready(kind) and bridge.answers(kind), f"{kind} has joined", JOIN_S)


@dataclass
class Member:
    """A worker of a deployment, by its address."""

    address: str


@dataclass
class Stages:
    """A model in three stages: on this device, in the tab, and on a native worker."""

    model: DeployedModel
    bridge: Bridge
    page: Page
    address: str  # of the tab's worker
    heard: Heard
    sent: list[int] = field(default_factory=list)  # bytes of each part of a file that was sent to the tab

    @property
    def has_page(self) -> bool:
        """True while the tab takes part."""
        return self.address in self.model.plan.devices


@contextmanager
def three_stages(folder: Path, path: Path, options: EngineOptions) -> Iterator[Stages]:
    with ExitStack() as closing:
        own_folders(closing.enter_context(pytest.MonkeyPatch.context()), folder / "own")
        bridge = closing.enter_context(running_bridge(folder, LOST_S, check=True))
        page = closing.enter_context(joined(bridge, folder, "chromium", 1))
        native = closing.enter_context(worker(folder / "native", "--name", "native", *ONE_THREAD))
        assert page is not None
        address = f"127.0.0.1:{bridge.port('chromium')}"
        devices = [LOCAL, address, native.address]
        plan = make_plan(limits(ModelFile.open(path)), path.stem, "", devices, "pipeline", (1, 1, 1))
        heard = Heard()
        members: Sequence[Any] = (Member(address), native)
        sent = count_sent(bridge)
        model = closing.enter_context(supervised(members, plan, options, steps=heard, path=path))
        yield Stages(model, bridge, page, address, heard, sent)


def count_sent(bridge: Bridge) -> list[int]:
    """Return a list that gets the size of each part of a file that is sent to the tab from now on."""
    exchange, sent = bridge._pages["chromium"]._exchange, list[int]()
    ask = exchange.ask

    def counted(header: dict[str, Any], payload: bytes | memoryview, *answers: Any) -> None:
        if header.get("op") == "chunk":
            sent.append(len(payload))
        ask(header, payload, *answers)

    exchange.ask = counted  # type: ignore[assignment, method-assign]
    return sent


# --- same ---


def same(folder: Path, args: argparse.Namespace) -> Figures:
    """Compare logits of three stages with those of this device."""
    options = replace(OPTIONS, outputs=ROWS, kv_type="f32", flash_attention="off")
    with Engine(args.model, options) as single:
        expected = logits(single)
    with three_stages(folder, args.model, options) as stages:
        result = logits(stages.model.engine)
    p, q = (log_softmax(rows) for rows in (expected, result))
    return {
        "deviation": float(np.abs(result - expected).max() / expected.std()),
        "divergence": float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        "same_greedy": float((expected.argmax(axis=1) == result.argmax(axis=1)).mean()),
    }


def logits(engine: TextEngine) -> Floats:
    """Return the logits of ROWS tokens, in several batches."""
    tokens = [int(token) for token in np.random.default_rng(1).integers(3, engine.model.n_vocab, ROWS)]
    ends = (0, ROWS // 2, ROWS // 2 + 1, ROWS)
    batches = [engine.decode(tokens[a:b], a, outputs="all") for a, b in pairwise(ends)]
    return np.concatenate(batches).astype(np.float64)


def log_softmax(rows: Floats) -> Floats:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def same_text(figures: Figures) -> str:
    return (
        f"Logits of {ROWS} positions differ by at most {figures['deviation']:.2e} of their standard deviation; the KL"
        f" divergence is {figures['divergence']:.2e} nats a token; {figures['same_greedy']:.0%} of the greedy tokens"
        " are the same. Asked of models in F32: 1e-4 at most."
    )


# --- closed ---


def closed(folder: Path, args: argparse.Namespace) -> Figures:
    """Close the tab in the middle of answers, in two ways, and open it again."""
    moments = random.Random(args.seed)
    rounds = list[Figures]()
    with three_stages(folder, args.model, OPTIONS) as stages:
        expected, n_tokens, _ = answer(stages, -1, "")
        first = sum(stages.sent)
        for number in range(args.closings):
            way, at = (
                ("left", "crashed")[number % 2],
                moments.randrange(n_tokens - 4),
            )  # later, the answer may end without the tab
            stages.sent.clear()
            n_lines = len(stages.heard.lines)
            text, _, pause_s = answer(stages, at, way)
            row = {"way": way, "at": at, "is_same": text == expected, "pause_s": pause_s}
            row["lines"] = stages.heard.lines[n_lines:]
            began = time.monotonic()
            stages.page.call("Page.navigate", url=f"{stages.bridge.url}/")
            until(lambda: stages.has_page, "the tab takes part again", BACK_S)
            row.update(back_s=time.monotonic() - began, sent_bytes=sum(stages.sent))
            rounds.append(row)
            progress(f"{number + 1} of {args.closings}: {way} at token {at}, pause {pause_s:.1f} s")
    return {"first_bytes": first, "rounds": rounds, "by_way": {way: of_way(rounds, way) for way in ("left", "crashed")}}


def answer(stages: Stages, at: int, way: str) -> tuple[str, int, float]:
    """Return a greedy answer, the number of its tokens, and the longest time between two of them.

    The tab is closed at token `at`; -1: never.
    """
    text, longest_s, last, number = "", 0.0, 0.0, -1
    params = SamplingParams(temperature=0)
    for number, response in enumerate(Chat(stages.model.engine).ask(QUESTION, params, max_tokens=ANSWER_TOKENS)):
        now = time.monotonic()
        longest_s, last = max(longest_s, now - last if last else 0.0), now
        text += response.text
        if number == at:
            close_tab(stages.page, way)
    return text, number + 1, longest_s


def close_tab(page: Page, way: str) -> None:
    """Leave the page, or end its process, which can tell nobody."""
    if way == "left":
        page.call("Page.navigate", url="about:blank")
        return
    page.send("Page.crash")  # a page that has ended may not answer


def of_way(rounds: Sequence[Figures], way: str) -> Figures:
    own = [row for row in rounds if row["way"] == way]
    pauses, backs = ([row[key] for row in own] for key in ("pause_s", "back_s"))
    return {
        "closings": len(own),
        "same_answers": sum(row["is_same"] for row in own),
        "with_a_line": sum(any("chromium" in line for line in row["lines"]) for row in own),
        "nothing_sent": sum(row["sent_bytes"] == 0 for row in own),
        "pause_s": {"median": statistics.median(pauses), "worst": max(pauses)},
        "back_s": {"median": statistics.median(backs), "worst": max(backs)},
    }


def closed_text(figures: Figures) -> str:
    lines = [
        [
            way,
            str(row["closings"]),
            *(str(row[key]) for key in ("same_answers", "with_a_line", "nothing_sent")),
            *(f"{row[key]['median']:.1f} s, {row[key]['worst']:.1f} at worst" for key in ("pause_s", "back_s")),
        ]
        for way, row in figures["by_way"].items()
    ]
    return table(
        ["tab", "closings", "same answers", "a line for the owner", "nothing sent again", "pause", "back after"], lines
    )
