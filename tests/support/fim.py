"""Tiny models with fill-in-the-middle tokens, by metadata or by token names that llama.cpp knows."""

from pathlib import Path

from tests.support.tiny_gguf import model

BOS, FIRST_BYTE = 1, 3
PRE, SUF, MID, REP, SEP = range(259, 264)
NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
CONTROL, USER_DEFINED = 3, 4


def fim_model(
    path: Path, n_marks: int = 5, *, names: tuple[str, ...] = NAMES, metadata: bool = True, kind: int = CONTROL
) -> Path:
    """Write one with the first marks of NAMES. A text has a token for each byte. metadata: whether the file says which
    tokens are marks. kind: type of these tokens."""
    tiny = model()
    tokens, types = (list(tiny.pairs[f"tokenizer.ggml.{name}"][1]) for name in ("tokens", "token_type"))
    tokens[PRE : PRE + n_marks], types[PRE : PRE + n_marks] = names[:n_marks], [kind] * n_marks
    tiny.pairs["tokenizer.ggml.tokens"] = ("arr[str]", tokens)
    tiny.pairs["tokenizer.ggml.token_type"] = ("arr[i32]", types)
    tiny.pairs["tokenizer.ggml.add_space_prefix"] = ("bool", False)
    if metadata:
        tiny.pairs |= {f"tokenizer.ggml.{key}_token_id": ("u32", PRE + i) for i, key in enumerate(KEYS[:n_marks])}
    return tiny.write(path)


def text(words: str) -> list[int]:
    """The tokens of a text."""
    return [FIRST_BYTE + byte for byte in words.replace(" ", "\u2581").encode()]
