"""The trained weights that tests use are those they were written for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real import weights


@pytest.mark.parametrize("network", [weights.SMOLLM2, *weights.NETWORKS], ids=lambda item: item.name)
def test_each_is_there(network: weights.Weights) -> None:
    assert network.path().stat().st_size > 500_000


def test_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CACHE", tmp_path)
    wheel = weights.Wheel("silero-vad", "6.2.3", "0" * 64)
    with pytest.raises(OSError, match=f"expected {'0' * 64}"):
        weights.Weights(wheel, "silero_vad/data/silero_vad.onnx").path()
    assert not list(tmp_path.iterdir())


def test_a_trained_model_answers(smollm2: Path) -> None:
    command = [sys.executable, "-m", "apps.cli", "chat", str(smollm2), "-p", "Who wrote Romeo and Juliet?"]
    command += ["--temperature", "0", "--max-tokens", "24", "--context", "256", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "William Shakespeare" in json.loads(done.stdout)["text"]
