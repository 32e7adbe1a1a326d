"""Mixtures of experts for benchmarks: routers are skewed in place and tokens made louder, and nothing else changes."""

from pathlib import Path

import numpy as np
import pytest

from edge.llama import ggml
from edge.models import synth
from quant.gguf.file import GgufFile
from quant.types import TYPES
from tests.support import ROOT

BENCHMARKS = ROOT / "benchmarks"
EXPERTS = 32


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = tmp_path / "experts.gguf"
    figures = {"layers": 3, "embd": 256, "ff": 64, "heads": 4, "head_size": 64, "vocab": 300}
    synth.synthesize(path, synth.shape("qwen3moe", **figures, experts=EXPERTS, experts_used=4, expert_ff=64))
    return path


def routers(path: Path) -> dict[str, np.ndarray]:
    file = GgufFile.open(path)
    names = [name for name in file.tensors if "ffn_gate_inp" in name]
    return {name: np.frombuffer(bytes(file.data(name)), np.float32).reshape(EXPERTS, -1) for name in names}


def test_rows_have_the_norms_and_keep_their_directions(model: Path) -> None:
    from skewed import order, scales, skew_router  # type: ignore[import-not-found]

    before = routers(model)
    assert skew_router(model, seed=7) == list(before)
    after = routers(model)
    assert np.sqrt((scales(EXPERTS) ** 2).mean()) == pytest.approx(1)
    for name, rows in after.items():
        norms = np.linalg.norm(rows, axis=1)
        assert norms == pytest.approx(scales(EXPERTS)[order(name, EXPERTS, 7)], rel=1e-5)
        along = (rows * before[name]).sum(axis=1) / norms / np.linalg.norm(before[name], axis=1)
        assert along == pytest.approx(np.ones(EXPERTS), abs=1e-5)
    longest = {int(np.linalg.norm(rows, axis=1).argmax()) for rows in after.values()}
    assert len(longest) > 1  # layers prefer different experts


@pytest.mark.parametrize(("change", "part", "n"), [("skew_router", "gate_inp", 3), ("louder_tokens", "token_embd", 1)])
def test_nothing_else_in_the_file_changes(model: Path, change: str, part: str, n: int) -> None:
    import skewed

    before = model.read_bytes()
    getattr(skewed, change)(model)
    after = model.read_bytes()
    spans = [(t.offset, t.offset + t.n_bytes) for name, t in GgufFile.open(model).tensors.items() if part in name]
    assert len(spans) == n
    at = 0
    for start, end in [*sorted(spans), (len(before), len(before))]:
        assert after[at:start] == before[at:start]
        assert after[start:end] != before[start:end] or start == end
        at = end
    assert len(after) == len(before)


def test_tokens_become_as_loud_as_asked_once(model: Path) -> None:
    from skewed import louder_tokens

    def table() -> np.ndarray:
        data = np.frombuffer(bytes(GgufFile.open(model).data("token_embd.weight")), np.uint8).reshape(300, -1)
        out = np.empty((300, 256), np.float32)
        ggml.dequantize_rows(data, TYPES["q4_0"].id, out)
        return out

    before = table()
    factor = louder_tokens(model, 2.5)
    assert np.sqrt((table() ** 2).mean()) == pytest.approx(2.5, rel=0.01)
    assert table() == pytest.approx(before * factor, rel=2e-3)
    assert louder_tokens(model, 2.5) == 1.0


def test_doing_it_again_changes_nothing(model: Path) -> None:
    from skewed import skew_router

    skew_router(model)
    once = model.read_bytes()
    skew_router(model)
    assert model.read_bytes() == once


def test_few_experts_are_chosen_most_of_the_time(model: Path) -> None:
    from skewed import skew_router

    hidden = np.random.default_rng(0).standard_normal((2000, 256))

    def share_of_the_first_quarter() -> float:
        rows = next(iter(routers(model).values()))
        chosen = np.argsort(-hidden @ rows.T, axis=1)[:, :4]
        counts = np.sort(np.bincount(chosen.ravel(), minlength=EXPERTS))[::-1]
        return float(counts[: EXPERTS // 4].sum() / counts.sum())

    plain = share_of_the_first_quarter()
    skew_router(model)
    assert plain < 0.35 < 0.45 < share_of_the_first_quarter()


def test_other_files_are_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from skewed import louder_tokens, skew_router

    path = tmp_path / "dense.gguf"
    synth.synthesize(path, synth.shape("llama", layers=1, embd=64, ff=64, heads=2, vocab=300), "q8_0")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="no routers"):
        skew_router(path)
    with pytest.raises(ValueError, match="q8_0"):
        louder_tokens(path)
    assert path.read_bytes() == before
