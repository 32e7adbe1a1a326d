"""The part of `check_loadable` that looks at the tokenizer: llama.cpp trusts its arrays and asserts the rest."""

from partition.model.metadata import Metadata
from partition.model.model import vocabulary_size
from quant.gguf.header import GgufArray

_BYTE = 6  # the token type of a token that stands for one byte
_NO_TOKEN = 2**32 - 1  # how -1, "there is none", looks in a u32
_ARRAYS = {"tokens": "arr[str]", "scores": "arr[f32]", "token_type": "arr[i32]", "merges": "arr[str]"}


def check_vocabulary(meta: Metadata) -> None:
    """Raise ModelFileError if the tokenizer's metadata would crash llama.cpp, when loading or when used."""
    model = meta.file.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise meta.error("tokenizer.ggml.model is missing or not a string; convert the model again")
    _check_arrays(meta)
    n_vocab = vocabulary_size(meta)
    for name in ("bos", "eos"):  # others, often padding, are out of range in files that work
        value = meta.file.metadata.get(f"tokenizer.ggml.{name}_token_id", 0)
        if isinstance(value, int) and value >= n_vocab and value != _NO_TOKEN and n_vocab:
            raise meta.error(f"tokenizer.ggml.{name}_token_id is {value}, but there are {n_vocab} tokens")
    tokens = meta.file.metadata.get("tokenizer.ggml.tokens")
    if model in ("none", "no_vocab") or not isinstance(tokens, GgufArray):
        return
    _check_tokens(meta, model, tokens)


def _check_arrays(meta: Metadata) -> None:
    """llama.cpp reads these arrays by their first item's address, as many items as there are tokens."""
    metadata = meta.file.metadata
    n_tokens = vocabulary_size(meta)
    for name, needed in _ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        value = metadata.get(key)
        if value is None:
            continue
        if meta.file.value_type(key) != needed:
            raise meta.error(f"{key} is stored as {meta.file.value_type(key)}, needed is {needed}")
        if name in ("scores", "token_type") and isinstance(value, GgufArray) and len(value) != n_tokens:
            raise meta.error(f"{key} has {len(value)} items for {n_tokens} tokens; convert the model again")
    charsmap = "tokenizer.ggml.precompiled_charsmap"
    if charsmap in metadata and meta.file.value_type(charsmap) not in ("arr[i8]", "arr[u8]"):
        raise meta.error(f"{charsmap} is stored as {meta.file.value_type(charsmap)}, needed are bytes")


def _check_tokens(meta: Metadata, model: str, tokens: GgufArray) -> None:
    seen: set[bytes] = set()
    for text in tokens.raw_strings():
        if text in seen and text:  # empty tokens get names of their own in llama.cpp
            raise meta.error(f"token {text.decode('utf-8', 'replace')!r} occurs twice; convert the model again")
        seen.add(text)
    types = meta.file.metadata.get("tokenizer.ggml.token_type")
    if model == "bert" and isinstance(types, GgufArray) and _BYTE in types[:]:
        raise meta.error("tokenizer.ggml.token_type marks byte tokens, which a bert tokenizer does not have")
    if model == "llama":
        missing = [b for b in range(256) if b"<0x%02X>" % b not in seen and bytes([b]) not in seen]
        if missing:
            raise meta.error(f"there is no token for {len(missing)} of the 256 bytes; convert the model again")
