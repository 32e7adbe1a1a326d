"""Test plans with drafts by a model's own layers: their cost, and when plans assume them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.cluster_file import Cluster
from edge.planning import drafted
from edge.planning.arrange import work_of
from edge.planning.plan_options import PlanOptions, engine_options
from edge.profiling.profile import ClusterProfile
from edge.speculate.mtp import mtp_bytes
from edge.tasks import SILENT
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.drafts import ACCEPTANCE, ROLLBACK_ROWS, Draft
from partition.predict.speeds import Curve, DeviceSpeed, Links
from tests.support.mtp import with_predictor

SPEED = DeviceSpeed(
    LOCAL, "here", step_s=Curve(((1, 0.001),)), layer_s=Curve(((1, 0.01), (8, 0.02))), token_s=1e-6,
    half_layer_s=Curve(((1, 0.005),)), head_s=Curve(((1, 0.1),)), memory_bytes=1 << 34, runtime_bytes=0,
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were measured on this device."""
    names: list[str] = []

    def known(file: ModelFile, *_: Any) -> tuple[str, ClusterProfile[DeviceSpeed]]:
        names.append(file.path.name)
        return "", ClusterProfile((SPEED,), Links(), ())

    monkeypatch.setattr(drafted, "measured_speeds", known)
    return names


def own_layers(path: Path, depth: int = 300, **how: Any) -> Draft | None:
    file = ModelFile.open(path)
    options = PlanOptions(**how)
    work = work_of(file, replace(engine_options(options), context=512), depth=depth)
    return drafted.draft_of(options, file, Cluster.of_addresses([]), work, SILENT)


def test_a_draft_takes_a_layer_and_the_head(tmp_path: Path, measured: list[str]) -> None:
    """Behind the text, of which the layer sees no more than it holds; its memory is that of this device."""
    path = with_predictor(tmp_path)
    for depth, attention_s in ((300, 300e-6), (5000, 1024e-6)):
        draft = own_layers(path, depth, draft="mtp")
        assert draft is not None
        assert draft.guess_s == pytest.approx(0.001 + 0.01 + 0.1 + attention_s)
    assert (draft.name, draft.acceptance, draft.worker) == ("mtp", ACCEPTANCE["mtp"], None)
    assert draft.held_bytes == mtp_bytes(ModelFile.open(path), 1)
    assert measured == [path.name] * 2


def test_auto_counts_on_them_as_it_drafts(tmp_path: Path, measured: list[str]) -> None:
    path = with_predictor(tmp_path)
    results = {name: own_layers(path, **how) for name, how in {
        "auto": {"draft": "auto"},
        "within a budget": {"draft": "auto", "memory": 1 << 30},
        "asked": {"draft": "mtp", "memory": 1 << 30, "acceptance": 0.5},
        "ngram": {"draft": "ngram"},
    }.items()}  # fmt: skip
    kinds = {name: (draft.name, draft.acceptance) for name, draft in results.items() if draft is not None}
    assert kinds == {
        "auto": ("mtp", 0.8), "within a budget": ("ngram", 0.4), "asked": ("mtp", 0.5), "ngram": ("ngram", 0.4),
    }  # fmt: skip


@pytest.mark.usefixtures("measured")
def test_recurrent_layers_have_the_drafts_that_they_can_forget(tmp_path: Path) -> None:
    """Those of one window, of one request."""
    path = with_predictor(tmp_path, "qwen35")
    for how in ("auto", "mtp", "ngram"):
        draft = own_layers(path, draft=how)
        assert draft is not None
        assert draft.rollback == ROLLBACK_ROWS
    assert own_layers(path, draft="auto", concurrency=2) is None
    with pytest.raises(PlanError, match="cannot roll back a wrong draft with several requests at once"):
        own_layers(path, draft="ngram", concurrency=2)
    other = own_layers(with_predictor(tmp_path), draft="auto", concurrency=2)
    assert other is not None
    assert other.rollback is None
