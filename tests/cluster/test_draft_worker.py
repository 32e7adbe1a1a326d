"""Test a draft model on a worker: the answers are those without drafts, only token ids are sent, and its loss costs
only speed.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import edge
from edge.api.config import EngineConfig, draft_of
from edge.cluster import helper_worker as helper
from edge.cluster.draft_worker import DraftDevice
from edge.errors import EngineError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.speculate.factory import WorkerDraft, drafts, speculation, with_room
from edge.speculate.small_model import ModelDrafts
from edge.tasks import SILENT, Steps
from edge.worker import draft_queries
from partition.model.file import ModelFile
from tests.conftest import Synthetic
from tests.support.commands import ASKED, main
from tests.support.deployments import ONE_THREAD, Heard, questions
from tests.support.drafting import ROOM, Answers, always, ids, plain_answers, run, speculate
from tests.support.helpers import until
from tests.support.workers import Worker
from transport.errors import TransportError


@pytest.fixture(scope="module")
def plain() -> Answers:
    return plain_answers([list(request.prompt) for request in questions(3)])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL_PATH, ROOM) as target:
        yield target


class Counted:
    """A proposer that counts. At its `at`th request something happens first."""

    def __init__(self, device: DraftDevice, at: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.device, self.at, self.then = device, at, then
        self.context, self.n_vocab = device.context, device.n_vocab
        self.requests = self.drafted = 0

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        self.requests += 1
        if self.requests == self.at:
            self.then()
        result = self.device.propose(tokens, n)
        self.drafted += len(result)
        return result


@contextmanager
def draft_device(item: Worker, engine: Engine, steps: Steps = SILENT) -> Iterator[DraftDevice]:
    """The worker with the bundled model, which drafts for itself. It must have no process at the end."""
    with DraftDevice(item.address, MODEL_PATH, engine.context, engine.model.n_vocab, steps=steps) as device:
        yield device
    until(lambda: not item.children(), "the end of the engine process")


def test_answers_are_the_same_and_ids_alone_cross(one_worker: Worker, engine: Engine, plain: Answers) -> None:
    with draft_device(one_worker, engine) as device:
        counted = Counted(device)
        drafter = speculate(ModelDrafts(counted), "small", device=device, choice=always(4))
        assert device._loaded is not None
        link = device._loaded.link
        sent, received = link.sent_bytes, link.received_bytes  # while it was made
        for prompt, expected in plain.items():
            assert ids(run(engine, prompt, drafter)) == expected
            assert drafter.stats.accepted > 0.6 * drafter.stats.drafted > 0  # it is the same model
        sent, received = link.sent_bytes - sent, link.received_bytes - received
        texts = sum(len(prompt) + len(target) for prompt, target in plain.items())
        assert received == 4 * counted.drafted
        assert 12 * counted.requests < sent <= 12 * counted.requests + 4 * (texts + counted.drafted)
        said = drafter.to_json()
        assert (said["draft"], said["draft_worker"], said["draft_worker_lost"]) == ("small", "one", False)
        assert drafter.describe().startswith("small on one: ")


@pytest.fixture(autouse=True)
def taken_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a lost draft worker lost for a test, where it says nothing else."""
    monkeypatch.setattr(helper, "AGAIN_S", 1e6)


def kill(item: Worker) -> None:
    for child in item.children():
        os.kill(child.pid, signal.SIGKILL)


def stop(item: Worker) -> None:
    for child in item.children():
        os.kill(child.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("harm", "why"), [(kill, "went away|was killed by SIGKILL"), (stop, "sent nothing for 0.5 s|stood still")]
)
def test_its_loss_leaves_the_answer_as_it_was(
    one_worker: Worker,
    engine: Engine,
    plain: Answers,
    harm: Callable[[Worker], None],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the first answer; the others have no drafts, either, and one line is said."""
    steps, (first, *others) = Heard(), plain.items()
    with draft_device(one_worker, engine, steps) as device:

        def lose() -> None:
            harm(one_worker)
            if harm is stop:
                monkeypatch.setattr(draft_queries, "ANSWER_S", 0.5)

        counted = Counted(device, 3, lose)  # the first takes in the prompt
        drafter = speculate(ModelDrafts(counted), "small", device=device, choice=always(4))
        assert ids(run(engine, first[0], drafter)) == first[1]
        assert drafter.stats.drafted > 0
        assert counted.requests > 2
        assert device.is_lost
        for prompt, expected in others:
            assert ids(run(engine, prompt, drafter)) == expected
            assert drafter.stats.drafted == 0
        assert drafter.to_json()["draft_worker_lost"] is True
        assert drafter.describe().startswith("small on one, which is lost: ")
        [line] = steps.lines
        assert line.startswith("one drafts no more, and the answer goes on without: ")
        assert re.search(why, line)
        until(lambda: not one_worker.children(), "the end of the engine process")  # also before this device lets go


def test_it_is_taken_back_when_it_is_there_again(
    engine: Engine, plain: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends in the middle of an answer, and one starts in its place. Each try to reach it waits longer."""
    monkeypatch.setattr(helper, "AGAIN_S", 0.01)
    monkeypatch.setattr(helper, "MOST_AGAIN_S", 0.04)
    steps, (first, *_, last) = Heard(), plain.items()
    begun = [Worker(tmp_path, ONE_THREAD, "127.0.0.1:0")]
    try:
        begun[0].port = int(begun[0].says(r"INFO listening .*address=\S+:(\d+)\b")[1])
        with DraftDevice(begun[0].address, MODEL_PATH, engine.context, engine.model.n_vocab, steps=steps) as device:
            counted = Counted(device, 2, begun[0].kill)
            drafter = speculate(ModelDrafts(counted), "small", device=device, choice=always(4))
            assert ids(run(engine, first[0], drafter)) == first[1]
            assert device.is_lost
            until(lambda: device._again_s == 0.04, "two tries more")
            begun.append(Worker(tmp_path, ONE_THREAD, begun[0].address))
            until(lambda: not device.is_lost, "the worker to draft again")
            assert ids(run(engine, last[0], drafter)) == last[1]
            assert drafter.stats.accepted > 0
            assert drafter.to_json()["draft_worker_lost"] is False
            lost, again = steps.lines
            assert "drafts no more, and the answer goes on without" in lost
            assert again == f"{device.name} drafts again"
        until(lambda: not begun[1].children(), "the end of the engine process")
    finally:
        for item in begun:
            item.kill()


def test_what_a_person_asks_for_is_done(one_worker: Worker, engine: Engine, tmp_path: Path) -> None:
    file = ModelFile.open(MODEL_PATH)
    request = drafts(MODEL_PATH, file, worker=one_worker.address)
    assert isinstance(request, WorkerDraft)
    assert (request.file.path, request.worker, request.insecure) == (MODEL_PATH, one_worker.address, False)
    config = EngineConfig(str(MODEL_PATH), draft=str(MODEL_PATH), draft_worker=one_worker.address)
    of_config = draft_of(EngineConfig.from_json(config.to_json()), SILENT)
    assert isinstance(of_config, WorkerDraft)
    assert (of_config.file.path, of_config.worker, of_config.insecure) == (MODEL_PATH, one_worker.address, False)
    with pytest.raises(ValueError, match="a worker drafts by a model, not by ngram"):
        edge.load(draft="ngram", draft_worker=one_worker.address)
    budget = replace(ROOM, memory=1 << 30)
    assert with_room(budget, request).reserved == 0 < with_room(budget, file).reserved
    with pytest.raises(TransportError):
        edge.load(draft=MODEL_PATH, draft_worker="127.0.0.1:9", threads=1, context=64)


def test_requests_are_drafted_for(one_worker: Worker, engine: Engine, plain: Answers) -> None:
    prompt, expected = next(iter(plain.items()))
    with ExitStack() as stack:
        drafter = speculation(WorkerDraft(ModelFile.open(MODEL_PATH), one_worker.address), engine, stack.enter_context)
        assert drafter is not None
        scheduler = Scheduler(engine, drafter=drafter)
        scheduler.add(Request(list(prompt), 24))
        results = []
        while scheduler.busy:
            results += [event.token_id for event in scheduler.step() if event.token_id is not None]
        assert results == expected
        assert drafter.stats.drafted > 0
        assert drafter.to_json()["draft_worker"] == "one"


def test_a_model_of_other_tokens_is_not_sent(one_worker: Worker, engine: Engine, synthetic: Synthetic) -> None:
    other = WorkerDraft(ModelFile.open(synthetic("llama", "f16")), one_worker.address)
    with pytest.raises(EngineError, match="its tokens differ"):
        speculation(other, engine, lambda _: pytest.fail("opened"))


def test_a_worker_without_memory_says_so(one_worker: Worker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.cluster.fleet.Fleet.memory_of", lambda self, address: 1 << 20)
    words = r"one needs .*use a smaller drafting model, or another worker"
    with pytest.raises(edge.NotEnoughMemory, match=words), draft_device(one_worker, engine):
        pytest.fail("it was loaded")


def test_the_command_lets_the_worker_draft(
    one_worker: Worker, engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells who drafted. Without the option nobody is asked."""
    said = []
    for more in ((), ("--draft-worker", one_worker.address)):
        loads = one_worker.log().count("session-loaded")
        assert main("chat", *ASKED, "--draft", MODEL_PATH, *more) == 0
        said.append(json.loads(capsys.readouterr().out))
        assert one_worker.log().count("session-loaded") - loads == len(more) // 2
        until(lambda: not one_worker.children(), "the end of the engine process")
    assert said[0]["token_ids"] == said[1]["token_ids"]
    assert [item["speculation"]["draft_worker"] for item in said] == [None, "one"]
    assert [item["speculation"]["draft_worker_lost"] for item in said] == [False, False]


@pytest.mark.parametrize("command", ["chat", "bench", "serve"])
@pytest.mark.parametrize("draft", [(), ("--draft", "ngram"), ("--draft", "off")])
def test_a_worker_needs_a_model(command: str, draft: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    request = ("-p", "Hi") if command == "chat" else ()
    assert main(command, *request, "--draft-worker", "127.0.0.1:9", *draft) == 2
    assert "use --draft FILE or --draft self" in capsys.readouterr().err
