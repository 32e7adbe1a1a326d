"""Test that the token table gives llama.cpp's first hidden states, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from edge.errors import EngineError
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from edge.llama.vocabulary import TokenTable
from edge.llm.engine import Engine
from edge.models.demo import MODEL_PATH
from quant.gguf.file import GgufFile
from tests.conftest import FIGURES, OPTIONS, Synthetic
from tests.support.slices import rewritten

TOKENS = [5, 300, 17, 401, 5, 260, 33, 511]


def first_states(path: Path, tokens: list[int]) -> np.ndarray:
    """Return what llama.cpp hands to its first layer."""
    seen: dict[str, np.ndarray] = {}

    def look(node: Node) -> None:
        seen[node.name] = node.read()

    names = ("embd", "inp_embd", "inp_scaled")
    with Engine(path, OPTIONS, hooks=[Hook(lambda node: node.name in names, look)]) as engine:
        engine.decode(tokens, 0)
    return next(seen[name] for name in reversed(names) if name in seen)


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("arch", FIGURES)
def test_rows_are_those_of_llama_cpp(synthetic: Synthetic, arch: str, type_name: str) -> None:
    path = synthetic(arch, type_name)
    table = TokenTable(GgufFile.open(path))
    out = np.empty((len(TOKENS), table.n_embd), np.float32)
    table.look_up(TOKENS, out)
    np.testing.assert_array_equal(out, first_states(path, TOKENS))


def test_rows_of_the_bundled_model() -> None:
    table = TokenTable(GgufFile.open(MODEL_PATH))
    tokens = [0, 1, 77, table.n_tokens - 1]
    out = np.empty((4, table.n_embd), np.float32)
    table.look_up(tokens, out)
    np.testing.assert_array_equal(out, first_states(MODEL_PATH, tokens))
    table.look_up([], out[:0])


@pytest.mark.parametrize("token", [-1, 512, 1 << 31])
def test_what_is_no_token_is_refused(synthetic: Synthetic, token: int) -> None:
    table = TokenTable(GgufFile.open(synthetic("llama")))
    with pytest.raises(EngineError, match="token ids are from 0 to 511"):
        table.look_up([5, token], np.empty((2, table.n_embd), np.float32))


def test_a_file_without_a_table(synthetic: Synthetic, tmp_path: Path) -> None:
    path = rewritten(synthetic("llama", "f32"), tmp_path / "none.gguf", drop={"token_embd.weight"})
    with pytest.raises(EngineError, match=r"none\.gguf has no token table"):
        TokenTable(GgufFile.open(path))
