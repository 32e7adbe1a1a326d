"""Sample answers with llama.cpp's own sampler chain, in its order and with its defaults."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

DEFAULTS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ("\n", ":", '"', "*"),
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "seed": 0,
}


def chain(model: Any, context: int, options: Mapping[str, Any]) -> Any:
    """A native chain with all samplers, whether they do something or not. options: by the names of SamplingParams."""
    p = {**DEFAULTS, **options}
    vocab = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    texts = [text.encode() for text in p["dry_sequence_breakers"]]
    breakers = (ctypes.c_char_p * len(texts))(*texts)
    last_n = context if p["dry_penalty_last_n"] == -1 else p["dry_penalty_last_n"]
    dry = (p["dry_multiplier"], p["dry_base"], p["dry_allowed_length"], last_n, breakers, len(texts))
    samplers = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in (
        llama_cpp.llama_sampler_init_penalties(n_vocab, 64, p["repeat_penalty"], 0.0, 0.0),
        llama_cpp.llama_sampler_init_dry(vocab, *dry),
        llama_cpp.llama_sampler_init_top_k(p["top_k"]),
        llama_cpp.llama_sampler_init_typical(p["typical_p"], 0),
        llama_cpp.llama_sampler_init_top_p(p["top_p"], 0),
        llama_cpp.llama_sampler_init_min_p(p["min_p"], 0),
        llama_cpp.llama_sampler_init_xtc(p["xtc_probability"], p["xtc_threshold"], 0, p["seed"]),
        llama_cpp.llama_sampler_init_temp(p["temperature"]),
        llama_cpp.llama_sampler_init_dist(p["seed"]),
    ):
        llama_cpp.llama_sampler_chain_add(samplers, sampler)
    return samplers


class BareLlama:
    """A model in bare llama.cpp, on one thread. Close it at the end."""

    def __init__(self, path: Path, context: int) -> None:
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=512, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False
        )
        self._context = context

    def answer(self, prompt: Sequence[int], n_tokens: int, options: Mapping[str, Any]) -> list[int]:
        """The tokens behind a prompt, which the samplers have seen, too. A token that ends a text is not among them."""
        llama = self._llama
        vocab = llama_cpp.llama_model_get_vocab(llama.model)
        samplers = chain(llama.model, self._context, options)
        try:
            for token in prompt:
                llama_cpp.llama_sampler_accept(samplers, token)
            llama.reset()
            llama.eval(list(prompt))
            tokens: list[int] = []
            while len(tokens) < n_tokens:
                token = llama_cpp.llama_sampler_sample(samplers, llama.ctx, -1)  # accepts it as well
                if llama_cpp.llama_vocab_is_eog(vocab, token):
                    break
                tokens.append(token)
                llama.eval([token])
            return tokens
        finally:
            llama_cpp.llama_sampler_free(samplers)

    def close(self) -> None:
        """Free it."""
        self._llama.close()
