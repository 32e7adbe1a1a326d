"""Test errors for drafts by a model's own layers: a llama.cpp without the calls, and files at which it would end the
process.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from edge.llama import predicting
from edge.llama.library import llama_cpp
from edge.llm.engine import Engine
from edge.speculate.factory import drafts
from partition.model.file import ModelFile
from tests.support.drafting import ROOM
from tests.support.mtp import with_predictor
from tests.support.slices import rewritten


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_library_without_the_calls_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_predictor(folder)
    monkeypatch.setattr(predicting, "_problem", "there is no llama_get_embeddings_nextn")
    with pytest.raises(EngineError, match=r"no llama_get_embeddings_nextn; install llama-cpp-python==0\.3\.36, or use"):
        drafts("mtp", ModelFile.open(path))
    assert drafts("auto", ModelFile.open(path)) == "auto"
    with Engine(path, ROOM) as engine, pytest.raises(EngineError, match="cannot draft by a model's own layers"):
        engine.hidden.give()

    class Older:
        llama_model_params = llama_context_params = type("Struct", (), {"_fields_": [("n_ctx", int)]})

    _, problem = predicting._open(Older)
    assert problem == "there is no load_mtp, ctx_type, LLAMA_CONTEXT_TYPE_MTP"
    assert predicting._open(llama_cpp)[1] == ""


LACKING = {
    "glm4moe": "ffn_gate_inp.weight",
    "deepseek2": "attn_k_b.weight",
    "hy_v3": "nextn.eh_proj.weight",
    "glm-dsa": "ffn_gate_inp.weight",
    "step35": "nextn.hnorm.weight",
}


@pytest.mark.parametrize(("arch", "name"), LACKING.items())
def test_files_that_lack_tensors_are_refused(folder: Path, tmp_path: Path, arch: str, name: str) -> None:
    """llama.cpp would stop the process. The model itself runs."""
    path = rewritten(with_predictor(folder, arch), tmp_path / "lacks.gguf", drop=[f"blk.4.{name}"])
    with pytest.raises(EngineError, match=rf"and lacks blk\.4\.{name}"):
        drafts("mtp", ModelFile.open(path))


@pytest.mark.parametrize(
    ("arch", "figures", "values", "reason"),
    [
        ("glm4moe", {"predictors": 2}, {}, "it has 2 layers that predict further tokens, and llama.cpp computes 1"),
        ("glm4moe", {}, {"leading_dense_block_count": ("u32", 5)}, "is said to have no experts"),
        ("deepseek2", {}, {"attention.temperature_scale": ("f32", 0.5)}, "where deepseek2.attention.temperature_scale"),
    ],
)
def test_files_that_llama_cpp_does_not_expect_are_refused(
    folder: Path, tmp_path: Path, arch: str, figures: dict[str, int], values: dict[str, Any], reason: str
) -> None:
    if figures:
        path = rewritten(
            with_predictor(folder, arch), tmp_path / "odd.gguf",
            {f"{arch}.nextn_predict_layers": ("u32", 2)},
            {f"blk.3.nextn.{name}.weight": np.ones(size, np.float32) for name, size in
             {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,)}.items()},
        )  # fmt: skip
    else:
        changed = {f"{arch}.{key}": value for key, value in values.items()}
        path = rewritten(with_predictor(folder, arch), tmp_path / "odd.gguf", changed)
    with pytest.raises(EngineError, match=reason):
        drafts("mtp", ModelFile.open(path))
