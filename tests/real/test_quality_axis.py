"""Test quality as an objective, with trained weights: divergence falls with bits, and the chosen type obeys the limit.

Two presets stand for the devices, so that no choice depends on how fast a machine is. SmolLM2 comes in Q4_1; its types
diverge from that file.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from edge.llm.options import EngineOptions
from edge.quantization.evaluate import evaluate
from quant.text import number_text
from tests.support.commands import assert_refused, runner, said
from tests.support.helpers import ROOT

WHAT_IF = """
[[device]]
name = "me"
address = "local"
preset = "pi4"

[[device]]
name = "other"
preset = "pi4"
"""
TYPES = ("q8_0", "q5_0", "q4_0")
HELD_OUT = ROOT / "tests" / "data" / "held-out.txt"


@pytest.fixture(scope="module", name="what_if")
def a_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    path.write_text(WHAT_IF)
    return path


@pytest.fixture(scope="module", name="text")
def a_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that was held out, of one chunk."""
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(HELD_OUT.read_text()[:3000])
    return path


def test_divergence_falls_with_bits_and_the_pick_obeys_the_limit(
    smollm2: Path, what_if: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_types = (smollm2, "--cluster", what_if, "--types", ",".join(TYPES), "--text", text)
    result = said(runner(capsys, "pareto"), *of_types)
    kinds = sorted(result["types"], key=lambda kind: -kind["size_bytes"])
    assert [kind["type"] for kind in kinds] == list(TYPES)
    assert all(0 < more["divergence"] < fewer["divergence"] for more, fewer in pairwise(kinds))
    assert {point["type"] for point in result["points"] if point["on_front"]} == {*TYPES}  # each is worth choosing
    for within, beyond in pairwise(kinds):
        limit = ("--max-divergence", repr((within["divergence"] + beyond["divergence"]) / 2))
        plan = said(runner(capsys, "plan"), *of_types, *limit)
        assert (plan["type"], plan["model"]) == (within["type"], within["model"])  # fewer bits are faster to read
        assert plan["predicted"]["divergence"] == within["divergence"]
        picked = said(runner(capsys, "pareto"), *of_types, *limit)
        assert {point["predicted"]["divergence"] for point in picked["points"]} <= {
            kind["divergence"] for kind in kinds[: kinds.index(beyond)]
        }
    refused = runner(capsys, "plan")(*of_types, "--max-divergence", repr(kinds[0]["divergence"] / 2))
    assert_refused(refused, 2, f"the lowest is {number_text(kinds[0]['divergence'])} nats a token, of q8_0")
    # What is remembered is what edge evaluate measures, of the text that was given.
    _, again = evaluate(smollm2, [kinds[-1]["model"]], text.read_text(), EngineOptions(threads=2))
    assert again.summary.mean_divergence == pytest.approx(kinds[-1]["divergence"], rel=0.02)
