"""Test stages that a page computes in node, behind the real bridge: distributed equals local, and a page may vanish."""

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edge.browser.page import CHUNK_BYTES, PageConnection
from edge.cluster.draft_worker import DraftDevice
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import LlmRanks
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.profiling.llm_survey import Estimator
from edge.speculate.small_model import ModelDrafts
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from tests.browser.test_page import SIZES
from tests.support import ROOT
from tests.support.bridge_process import Bridge, running_bridge
from tests.support.bridged_page import bridged_page
from tests.support.deployments import (
    EXACT,
    OPTIONS,
    Floats,
    Heard,
    deviations,
    greedy_answers,
    own_folders,
    questions,
    supervised,
)
from tests.support.drafting import ROOM, always, ids, plain_answers, run, speculate
from tests.support.helpers import until
from tests.support.slices import synthetic
from tests.support.thorough import some

QUESTIONS = ("My name is Ada.", "What is 12 + 30?", "What is my name?")
TOKENS = [int(token) for token in np.random.default_rng(3).integers(270, 310, 48)]


@dataclass
class NodePage:
    """A page in node, with the address of its worker. It has the part of `Worker` that deployments use."""

    bridge: Bridge
    store: Path
    command: list[str]
    address: str = ""
    process: "subprocess.Popen[bytes] | None" = None

    def open(self) -> None:
        """Open the page, and wait until its worker answers."""
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        until(lambda: self.bridge.is_ready("phone"), "the page is ready", 120)
        self.address = f"127.0.0.1:{self.bridge.port('phone')}"
        until(lambda: self.bridge.answers("phone"), "the worker answers", 120)

    def vanish(self) -> None:
        """End the page without a word."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def page(node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodePage]:
    own_folders(monkeypatch, tmp_path / "own")
    with running_bridge(tmp_path, check=True) as bridge:
        token = bridge.browsers.invite("phone", 600)
        script = str(ROOT / "tests/support/node_page.mjs")
        store = tmp_path / "store"
        page = NodePage(bridge, store, [node, script, "--store", str(store), "--threads", "1", "--", bridge.url, token])
        page.open()
        yield page
        page.vanish()


def plan(path: Path, page: NodePage, *shares: int) -> Plan:
    """A stage here and one at the page."""
    return make_plan(
        limits(ModelFile.open(path)), path.stem, "", [LOCAL, page.address], parallel="pipeline", shares=shares
    )


@contextmanager
def deployed(model: Path, page: NodePage, options: EngineOptions) -> Iterator[TextEngine]:
    """The model here and at the page."""
    stages, file = plan(model, page, 1, 1), ModelFile.open(model)
    with Fleet([page.address]) as fleet, LlmRanks(fleet, stages, file, options) as ranks:
        yield ranks.engine


def logits(engine: TextEngine) -> Floats:
    """Logits of a prompt, of tokens after it, and of others after some of them were removed."""
    engine.decode(TOKENS[:8], 0, outputs="none")
    rows = [engine.decode(TOKENS[8:32], 8, outputs="all"), engine.decode(TOKENS[32:33], 32, outputs="all")]
    assert engine.kv_remove(0, 20, -1)
    rows.append(engine.decode(TOKENS[33:40], 20, outputs="all"))
    engine.kv_clear()
    rows.append(engine.decode(TOKENS[:3], 0, outputs="all"))
    return np.concatenate(rows)


@pytest.mark.parametrize("arch", ["llama", *some((), ("gemma2", "qwen2moe"))])
def test_a_stage_at_the_page_computes_what_this_device_computes(arch: str, page: NodePage, tmp_path: Path) -> None:
    model = synthetic(tmp_path / f"{arch}.gguf", arch, layers=6, vocab=320)
    with Engine(model, EXACT) as single:
        expected = logits(single)
    with deployed(model, page, EXACT) as ranks:
        result = logits(ranks)
    assert deviations(result, expected) < 1e-4


def test_a_page_that_vanishes_in_the_middle_is_a_pause(page: NodePage) -> None:
    """The answers go on with the same tokens. Opened again, the page is used again, and no slice is sent."""
    with Fleet([page.address]) as fleet:
        speeds = Estimator(fleet).survey(ModelFile.open(MODEL_PATH)).speeds
    assert [speed.shares_layers for speed in speeds] == [True, False]  # no plan shares the page's layers
    with Engine(MODEL_PATH, OPTIONS) as single:
        expected = greedy_answers(single, QUESTIONS, 12, {})
    steps = Heard()
    with supervised([page], plan(MODEL_PATH, page, 1, 1), steps=steps) as model:  # type: ignore[list-item]
        assert greedy_answers(model.engine, QUESTIONS, 12, {14: page.vanish}) == expected
    assert any("phone" in line for line in steps.lines), steps.lines
    stored = {path: path.stat().st_mtime_ns for path in page.store.rglob("*") if len(path.name) == 64}
    assert stored
    page.open()
    with deployed(MODEL_PATH, page, OPTIONS) as ranks:
        assert greedy_answers(ranks, QUESTIONS, 12, {}) == expected
    assert {path: path.stat().st_mtime_ns for path in page.store.rglob("*") if len(path.name) == 64} == stored


def test_a_page_drafts_with_a_whole_model_until_it_vanishes(page: NodePage) -> None:
    """The answers are those without drafts."""
    plain, steps = plain_answers([list(request.prompt) for request in questions(2)]), Heard()
    (first, expected), (second, expected_later) = plain.items()
    with Engine(MODEL_PATH, ROOM) as engine, ExitStack() as closing:
        device = closing.enter_context(
            DraftDevice(page.address, MODEL_PATH, engine.context, engine.model.n_vocab, steps=steps)
        )
        drafter = speculate(ModelDrafts(device), "small", device=device, choice=always(4))
        assert ids(run(engine, first, drafter)) == expected
        assert drafter.stats.accepted > 0.6 * drafter.stats.drafted > 0  # it is the same model
        page.vanish()
        assert ids(run(engine, second, drafter)) == expected_later
        assert device.is_lost
    [line] = steps.lines
    assert line.startswith("phone drafts no more, and the answer goes on without: ")


@pytest.mark.parametrize(("last", "options"), [(False, ()), (True, ("--quota", str(3 << 20)))])
def test_slice_that_is_sent_ahead_outlives_the_end_of_another_session(
    node: str, tmp_path: Path, last: bool, options: tuple[str, ...]
) -> None:
    """Its parts that did not fit into the storage are sent again.

    last: the other session ends after the last chunk was sent, instead of after the first one.
    """
    ahead = tmp_path / "ahead.gguf"
    ahead.write_bytes(MODEL_PATH.read_bytes() + bytes(CHUNK_BYTES))
    n_chunks = -(-ahead.stat().st_size // CHUNK_BYTES)
    with ExitStack() as closing:
        bridge = closing.enter_context(bridged_page(node, tmp_path, *options, threads=1))
        first, second = (
            closing.enter_context(contextlib.closing(PageConnection(bridge.folder("phone")))) for _ in range(2)
        )
        first.load_file(MODEL_PATH, "load", **SIZES)
        progress = list[float]()

        def end_the_first(fraction: float) -> None:
            progress.append(fraction)
            if len(progress) == (n_chunks if last else 1):
                first.close()
                until(lambda: not bridge.is_held("phone"), "the page is free")

        second.on_progress = end_the_first
        answer, _ = second.load_file(ahead, "load", **SIZES)
    assert answer["model"]["n_vocab"] == ModelFile.open(MODEL_PATH).shape.n_vocab
    assert second._number > n_chunks + 2  # it asked to load twice, or sent a chunk twice
