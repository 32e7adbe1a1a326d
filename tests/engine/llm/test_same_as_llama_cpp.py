"""`edge chat` gives the tokens that llama-cpp-python's own class gives for the same file and prompt."""

from pathlib import Path

import llama_cpp
import pytest

from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.models.demo import MODEL_PATH
from tests.conftest import OPTIONS, Synthetic
from tests.support.helpers import chat_json, edge_here, run_edge

N_TOKENS = 24
QUESTION = "How many minutes are in 3 hours?"


def prompt_tokens(path: Path) -> list[int]:
    with Engine(path, OPTIONS) as engine:
        chat = Chat(engine)
        chat.messages.append({"role": "user", "content": QUESTION})
        return chat.prompt_tokens()


def reference(path: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of llama_cpp.Llama, with the same settings of the context as ours."""
    llama = llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False
    )
    try:
        tokens: list[int] = []
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            if len(tokens) == N_TOKENS or llama_cpp.llama_vocab_is_eog(
                llama_cpp.llama_model_get_vocab(llama.model), token
            ):
                return tokens
            tokens.append(token)
        return tokens
    finally:
        llama.close()


def check_same(path: Path) -> None:
    """In this process, and in one of its own."""
    request = ("chat", path, "-p", QUESTION, "--temperature", "0", "--max-tokens", str(N_TOKENS), "--threads", "1")
    here, there = (chat_json(*request, "--context", "512", run=run)["token_ids"] for run in (edge_here, run_edge))
    assert here == there == reference(path, prompt_tokens(path))
    assert len(here) > 3


def test_the_bundled_model() -> None:
    check_same(MODEL_PATH)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "qwen3moe"])
def test_architectures(synthetic: Synthetic, arch: str) -> None:
    check_same(synthetic(arch, "q8_0"))
