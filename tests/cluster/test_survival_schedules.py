"""Devices are lost at any frame, in any order, while several answers are given: each goes on as if nothing had been.

The cluster is of threads over sockets (`tests.support.faulty_ranks`), with real ranks, and the real code that notices a
loss and goes on. Schedules are random: what is asked and cancelled, and what happens to whom at which frame.

A schedule that fails is shown as steps, and made again by its seed:

    EDGE_SURVIVAL_SEED=7 python -m pytest -n 0 tests/cluster/test_survival_schedules.py

EDGE_THOROUGH=1 tries many more of one seed.
"""

import gc
import os
import random
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from edge.cluster.rank_group import RankGroup
from edge.errors import EdgeError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.parallel.replaceable import ReplaceableEngine
from partition.plan.plan import LOCAL
from tests.conftest import Synthetic
from tests.support.cases import Cases, clear_case, random_tokens
from tests.support.deployments import pipeline, stages, tensor
from tests.support.faulty_ranks import FAULTS, OF_LINKS, Cluster, Fault, cluster
from tests.support.helpers import until
from tests.support.thorough import THOROUGH, some

SEED = int(os.environ.get("EDGE_SURVIVAL_SEED", "0"))
OPTIONS = EngineOptions(threads=1, context=96, batch=8, sequences=3, kv_type="f32", flash_attention="off")
PLANS = (tensor(1, 1), pipeline(1, 1), tensor(1, 1, 1), stages(1, 2), stages(2, 1), stages(2, 2))
LONGEST = 12  # tokens of an answer
FAULT = st.builds(Fault, st.integers(0, 60), st.sampled_from(FAULTS), st.integers(0, 127))
MOST_STEPS = 5_000  # of a scheduler: only against a hang


@dataclass
class Answer:
    """A request, and what has come of it."""

    expected: list[int]  # of the undisturbed run
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # how it ended: once


@pytest.fixture(scope="module")
def model(synthetic: Synthetic) -> Path:
    return synthetic("llama", "f32")


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Cases:
    """Prompts and their greedy answers on one device. In none of them two tokens come close to each other: sums in
    another order then give the same."""
    rng, results = random.Random(SEED), Cases()

    def prompt() -> list[int]:
        tokens = random_tokens(rng, rng.choice((1, 2, 5, 8, 9, 20, 33)))
        if results and rng.random() < 0.4:  # begins like another one
            return [*rng.choice(results)[0], *tokens][:40]
        return tokens

    with Engine(model, OPTIONS) as whole:
        while len(results) < 12:
            results.append(clear_case(whole, prompt, LONGEST))
    return results


class Schedules(RuleBasedStateMachine):
    """Things that are asked of a cluster, and things that happen to it.

    Whether a rule can do something must not decide whether it is drawn: that depends on threads, and draws must not.
    """

    model: Path
    undisturbed: list[tuple[list[int], list[int]]]

    def __init__(self) -> None:
        super().__init__()
        self.before = _left()
        self.life = ExitStack()
        self.answers: dict[int, Answer] = {}
        self.scheduler: Scheduler | None = None
        self.engine: ReplaceableEngine | None = None

    @initialize(plan=st.sampled_from(PLANS), keep=st.booleans(), which=st.integers(0, 11), fault=FAULT)
    def begin(self, plan: dict[str, Any], keep: bool, which: int, fault: Fault) -> None:
        folder = Path(self.life.enter_context(tempfile.TemporaryDirectory()))
        self.cluster: Cluster = self.life.enter_context(cluster(self.model, folder, 3))
        self.engine = self.life.enter_context(self.cluster.running(plan, OPTIONS))
        self.keep = keep
        self.ask(which, LONGEST)
        self.happen(0, fault)

    @rule(which=st.integers(0, 11), n=st.integers(1, LONGEST))
    def ask(self, which: int, n: int) -> None:
        if self.scheduler is None:
            try:
                self.scheduler = Scheduler(self.engine, keep=self.keep)
            except Exception as error:
                self._named(error)
                return
            self.answers = {}
        prompt, answer = self.undisturbed[which]
        number = self.scheduler.add(Request(prompt, n, ends=False))
        self.answers[number] = Answer(answer[:n])

    @rule(n=st.integers(1, 30))
    def go_on(self, n: int) -> None:
        for _ in range(n):
            self._step()

    @rule(which=st.integers(0, 11))
    def cancel(self, which: int) -> None:
        if self.scheduler is not None and self.answers:
            self.scheduler.cancel(list(self.answers)[which % len(self.answers)])

    @rule(which=st.integers(0, 2), fault=FAULT)
    def happen(self, which: int, fault: Fault) -> None:
        self.cluster.fault(self.cluster.others[which], replace(fault))

    @rule(fault=FAULT.filter(lambda fault: fault.kind in OF_LINKS))
    def happen_here(self, fault: Fault) -> None:
        self.cluster.fault(LOCAL, replace(fault))

    @rule(which=st.integers(0, 2))
    def come_back(self, which: int) -> None:
        self.cluster.devices[self.cluster.others[which]].come_back()

    def teardown(self) -> None:
        """All answers come to their ends, also where things still happen, and nothing is left of any of it."""
        if self.engine is not None:
            for _ in range(MOST_STEPS):
                if self.scheduler is None or not self.scheduler.busy:
                    break
                self._step()
            if self.scheduler is not None:
                assert not self.scheduler.busy, "the answers come to no end"
                self.scheduler.close()
            for answer in self.answers.values():
                assert len(answer.ends) == 1, answer
                if answer.ends == ["length"]:
                    assert answer.tokens == answer.expected
        self.life.close()
        self.scheduler = self.engine = self.cluster = None  # type: ignore[assignment]  # each knows the model's file
        until(
            lambda: all(now <= then for now, then in zip(_left(), self.before, strict=True)),
            f"an end of all but {self.before}, left is {_left()}",
            20,
        )

    def _step(self) -> None:
        if self.scheduler is None or not self.scheduler.busy:
            return
        try:
            events = self.scheduler.step()
        except Exception as error:
            self._named(error)
            self.scheduler.close()
            self.scheduler = None
            for answer in self.answers.values():
                if not answer.ends:
                    answer.ends.append(str(error))
            return
        for event in events:
            answer = self.answers[event.request]
            assert not answer.ends, "more came after the end"
            if event.token_id is not None:
                answer.tokens.append(event.token_id)
            assert answer.tokens == answer.expected[: len(answer.tokens)]
            if event.finish_reason is not None:
                answer.ends.append(event.finish_reason)

    def _named(self, error: Exception) -> None:
        """An error that ends answers early says what happened, to a person."""
        if not isinstance(error, EdgeError) or not str(error):
            raise error


def _left() -> tuple[int, int]:
    """Open files, sockets and locked ones among them, and threads."""
    gc.collect()  # errors hold what was there when they were raised, and files that are mapped with it
    threads = [item for item in threading.enumerate() if item.name in ("rank", "silence")]
    with suppress(FileNotFoundError):
        return len(os.listdir("/proc/self/fd")), len(threads)
    return 0, len(threads)


def answered(engine: ReplaceableEngine, prompt: list[int]) -> list[int]:
    return Scheduler(engine).run([Request(prompt, LONGEST, ends=False)])[0]


def test_more_devices_are_left_than_there_are_layers(
    model: Path, undisturbed: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    """Each would have a stage of its own: the plan is made for fewer."""
    prompt, answer = undisturbed[0]
    with cluster(model, tmp_path, 3) as here, here.running(stages(2, 2), OPTIONS) as engine:
        here.fault(here.others[0], Fault(10, "kill"))
        assert answered(engine, prompt) == answer
        assert engine.replacements.recoveries == 1
        assert "going on with this device and worker" in here.said[0]


def test_who_has_no_room_after_a_loss_is_left_out(
    model: Path, undisturbed: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    prompt, answer = undisturbed[0]
    with cluster(model, tmp_path, 3) as here, here.running(tensor(1, 1, 1, 1), OPTIONS) as engine:
        lost, full, other = here.others
        here.devices[full].has_room = False
        here.fault(lost, Fault(10, "kill"))
        assert answered(engine, prompt) == answer
        assert here.said[1] == "worker 2 has no room: going on with this device and worker 3"
        here.devices[other].has_room = False
        here.fault(other, Fault(3, "kill"))
        assert answered(engine, prompt) == answer
        assert here.said[-1].endswith("going on with this device")


def test_who_is_lost_again_at_once_is_left_out(
    model: Path, undisturbed: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    """As a worker without enough memory for what it has loaded: its daemon answers, its process is always killed."""
    prompt, answer = undisturbed[0]
    with cluster(model, tmp_path, 2) as here, here.running(tensor(1, 1, 1), OPTIONS) as engine:
        here.fault(here.others[0], Fault(10, "end"))
        here.devices[here.others[0]].fails_at = 2
        assert answered(engine, prompt) == answer
        assert engine.replacements.recoveries == 2
        assert here.said[0].endswith("going on with this device, worker 1 and worker 2")
        assert here.said[1].endswith("going on with this device and worker 2")


def test_a_rank_that_waits_for_this_one_is_not_waited_for(
    model: Path,
    undisturbed: list[tuple[list[int], list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the link to another one breaks, all say how that ended for them, and none is given up."""
    words: list[list[Exception | None]] = []
    explained = RankGroup._explained

    def heard(group: RankGroup, error: Exception) -> Exception:
        result = explained(group, error)
        words.append([session.died for session in group._sessions])
        return result

    monkeypatch.setattr(RankGroup, "_explained", heard)
    prompt, answer = undisturbed[0]
    with cluster(model, tmp_path, 2) as here, here.running(stages(2, 1), OPTIONS) as engine:
        here.fault(here.others[0], Fault(10, "cut"))
        assert answered(engine, prompt) == answer
    assert len(words) == 1
    assert len(words[0]) == 2
    assert None not in words[0]


def test_answers_go_on_whatever_is_lost(model: Path, undisturbed: list[tuple[list[int], list[int]]]) -> None:
    class Here(Schedules):
        pass

    Here.model, Here.undisturbed = model, undisturbed
    chosen = settings(
        max_examples=some(12, 1000),
        stateful_step_count=some(25, 50),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=[Phase.generate, *([Phase.shrink] if THOROUGH else [])],
    )
    run_state_machine_as_test(seed(SEED)(Here), settings=chosen)
