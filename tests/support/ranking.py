"""Tiny rerankers, and their scores as llama.cpp computes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

from tests.support.tiny_gguf import EMBD, Tensor, model

TEMPLATE = "<|im_start|>Is it so?\nQ: {query}\nD: {document}<|im_end|>\nYes or no:"

START, END = 259, 260


def decoder(path: Path, *, head: bool = True, template: str = TEMPLATE) -> Path:
    """Write a reranker of the form of Qwen3-Reranker: a decoder with a template, and a head for yes and no."""
    tiny = model("qwen3")
    tokens, types = (list(tiny.pairs[f"tokenizer.ggml.{name}"][1]) for name in ("tokens", "token_type"))
    tokens[START : END + 1], types[START : END + 1] = ["<|im_start|>", "<|im_end|>"], [3, 3]
    tiny.pairs |= {
        "tokenizer.ggml.tokens": ("arr[str]", tokens),
        "tokenizer.ggml.token_type": ("arr[i32]", types),
        "tokenizer.chat_template.rerank": ("str", template),
        "qwen3.pooling_type": ("u32", 4),
        "qwen3.classifier.output_labels": ("arr[str]", ["yes", "no"]),
    }
    if head:
        tiny.tensors["cls.output.weight"] = Tensor((EMBD, 2))
    return tiny.write(path)


class LlamaCpp:
    """A reranker that llama-cpp-python runs."""

    def __init__(self, path: Path, context: int = 128) -> None:
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_ubatch=context, n_threads=1, n_threads_batch=1, embedding=True,
            pooling_type=llama_cpp.LLAMA_POOLING_TYPE_RANK, flash_attn=True, verbose=False,
        )  # fmt: skip

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        return self._llama.tokenize(text.encode(), add_bos=False, special=special)

    def score(self, tokens: list[int]) -> float:
        context: Any = self._llama.ctx
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        batch.n_tokens = len(tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        assert llama_cpp.llama_decode(context, batch) == 0
        score = float(llama_cpp.llama_get_embeddings_seq(context, 0)[0])
        llama_cpp.llama_batch_free(batch)
        return score

    def close(self) -> None:
        self._llama.close()


@contextmanager
def llama_cpp_of(path: Path) -> Iterator[LlamaCpp]:
    """It, until the end of the block."""
    reranker = LlamaCpp(path)
    try:
        yield reranker
    finally:
        reranker.close()
