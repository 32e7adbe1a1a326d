"""Prompts of trained weights, computed by one placement and continued by another: the bits of one device."""

from dataclasses import replace
from pathlib import Path

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from tests.support.deployments import pipeline
from tests.support.phases import phases
from tests.support.ranks_here import ranks_here

OPTIONS = EngineOptions(threads=1, context=512, batch=64, flash_attention="off")
TEXT = "The river rises in the hills above the old town, where rain falls on two days of three. " * 12
TOKENS = 24


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_moved_prompts_go_on_with_the_bits_of_one_device(kv_type: str, smollm2: Path, tmp_path: Path) -> None:
    """Stages of one rank compute what one device would, in the same steps, and keys and values move in their own
    type."""
    options = replace(OPTIONS, kv_type=kv_type)
    with ranks_here(smollm2, pipeline(1, 1), options, tmp_path) as prefill, Engine(smollm2, options) as decode:
        prompt = decode.model.tokenize(TEXT, add_special=True, parse_special=False)[:250]
        with phases(decode, prefill) as both:
            moved = Scheduler(both.engine).run([Request(prompt, TOKENS, ends=False)])[0]
            assert not both.lost
        whole = Slot(decode)
        whole.cut(0)
        chunk = prefill.chunk(len(prompt) - 1)
        assert chunk < len(prompt) / 2
        for start in range(0, len(prompt) - 1, chunk):
            whole.decode(prompt[start : min(start + chunk, len(prompt) - 1)], "none")
        expected = [int(whole.decode(prompt[-1:]).argmax())]
        while len(expected) < TOKENS:
            expected.append(int(whole.decode(expected[-1:]).argmax()))
        assert moved == expected
