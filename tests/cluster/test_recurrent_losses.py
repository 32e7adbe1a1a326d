"""Test the loss of a worker's process for a model with recurrent layers: the computation restarts at the last snapshot
on the ranks' disks, and the tokens are those of one device.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.snapshots import ANSWER_TOKENS, LAST_TOKENS
from edge.parallel.replaceable import ReplaceableEngine
from tests.support.deployments import own_folders, pipeline, plan_for, supervised, two_workers_to_end
from tests.support.helpers import until
from tests.support.slices import synthetic
from tests.support.thorough import each_once

pytestmark = pytest.mark.usefixtures("measured_briefly")

OPTIONS = EngineOptions(
    threads=1, context=400, batch=64, kv_type="f32", flash_attention="off", repack=False, sequences=1
)
PROMPT = [270 + 3 * i % 40 for i in range(120)]
LAST = (len(PROMPT) - LAST_TOKENS) // 8 * 8  # the last snapshot of the prompt
ANSWER = ANSWER_TOKENS + 30


@pytest.mark.parametrize(("arch", "at"), each_once(["lfm2", "qwen35"], [5, ANSWER - 5]))
def test_an_answer_goes_on_from_the_last_snapshot(
    arch: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    model = synthetic(tmp_path / f"{arch}.gguf", arch, layers=12, vocab=320, embd=64, ff=96)
    options = replace(OPTIONS, prefixes=PrefixOptions(1 << 30, tmp_path / "kept", tmp_path / "key"))
    with Engine(model, OPTIONS) as alone:
        ends = {token: -1000.0 for token in range(alone.model.n_vocab) if alone.model.is_end(token)}
        sampling = SamplingParams(temperature=0, allow_repetition=True, logit_bias=ends)
        request = Request(PROMPT, ANSWER, sampling)
        [expected] = Scheduler(alone).run([request])
    assert len(expected) == ANSWER
    with (
        two_workers_to_end(tmp_path) as two,
        supervised(two, plan_for(model, two, pipeline(1, 1, 1)), options, path=model) as deployed,
    ):
        engine = deployed.engine
        assert isinstance(engine, ReplaceableEngine)
        scheduler, tokens, computed, is_lost = Scheduler(engine, keep=True), list[int](), list[int](), False
        scheduler.add(request)
        while scheduler.busy:
            for event in scheduler.step():
                if event.token_id is not None:
                    tokens.append(event.token_id)
            if len(tokens) == at and not is_lost:
                is_lost = True
                last = (LAST if at < ANSWER_TOKENS else LAST + ANSWER_TOKENS) // 8
                hashes = engine.states.block_hashes([*PROMPT, *tokens])[: len(PROMPT) // 8 + at // 8]
                until(
                    lambda: engine.replacements.between_steps(lambda now: now.states.n_cached(hashes)) >= last,  # noqa: B023
                    "the last snapshot is on all disks",
                )
                for child in two[1].children():
                    os.kill(child.pid, signal.SIGKILL)
            if engine.replacements.recoveries and scheduler.queues.running and not computed:
                computed.append(scheduler.queues.running[0].to_prefill)
        assert tokens == expected
        assert engine.replacements.recoveries == 1
        # What follows a snapshot that is up to a block before its place.
        assert 0 < computed[0] <= (LAST_TOKENS + 8 + at if at < ANSWER_TOKENS else ANSWER_TOKENS + 8)
