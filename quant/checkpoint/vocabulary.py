"""The vocabulary of a checkpoint as the metadata of a GGUF.

These families use two of llama.cpp's tokenizers. "llama" merges the pair with the best score (sentencepiece). "gpt2"
follows a list of merges inside words that a regular expression cuts out (byte-level BPE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quant.checkpoint.bpe import byte_level, is_byte_level, scored, space_prefix
from quant.checkpoint.checkpoint import Checkpoint
from quant.checkpoint.families import Model
from quant.checkpoint.tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    AddedToken,
    Vocabulary,
    string,
)
from quant.errors import ModelFileError
from quant.gguf.writer import encoded
from quant.text import with_article

_TOKENIZER, _CONFIG, _SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # GGUF's name, by Hugging Face's name
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
_BPE = 2  # model type of the trainer: pairs are merged by score, as llama.cpp does
_TYPES = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}


def vocabulary_pairs(model: Model, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return all `tokenizer.` pairs, with as many tokens as the model's token embeddings have rows.

    Raises ModelFileError if there is no tokenizer, or if none of llama.cpp's gives the same tokens.
    """
    tokenizer, settings = checkpoint.json(_TOKENIZER), checkpoint.json(_CONFIG)
    added = _added(tokenizer, settings, checkpoint.json("added_tokens.json"))
    if is_byte_level(tokenizer):
        vocabulary = byte_level(tokenizer, added, model.vocab)
    else:
        raw = checkpoint.content(_SENTENCEPIECE)
        if raw is None and not tokenizer:
            raise ModelFileError(f"{checkpoint.folder}: it has neither {_TOKENIZER} nor {_SENTENCEPIECE}; download one")
        vocabulary = scored(tokenizer, added, model.vocab) if raw is None else read_sentencepiece(raw)
        if raw is not None:
            vocabulary.fit(added, model.vocab)
            _set_prefix(vocabulary, tokenizer, settings)
    vocabulary.check()
    specials = _specials(vocabulary, added, settings, checkpoint.json("special_tokens_map.json"), model)
    return {
        **vocabulary.pairs(),
        **{f"tokenizer.ggml.{key}_token_id": encoded("u32", token) for key, token in specials.items()},
        **_around_pairs(tokenizer, settings, specials, vocabulary.model == "llama"),
        **_template_pairs(checkpoint, settings),
    }


def _added(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], older: Mapping[str, Any]
) -> dict[int, AddedToken]:
    """Return tokens added to the trained ones, by id: tokenizer_config.json wins, then tokenizer.json."""
    tokens: dict[int, AddedToken] = {}
    for entry in _list(tokenizer.get("added_tokens"), _TOKENIZER):
        token = AddedToken.read(entry, _TOKENIZER)
        tokens[_id(entry.get("id"), _TOKENIZER)] = token
    for content, number in older.items():
        tokens.setdefault(_id(number, "added_tokens.json"), AddedToken(string(content, "added_tokens.json"), False))
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelFileError(f"{_CONFIG}: added_tokens_decoder is not an object")
    for key, entry in decoder.items():
        tokens[_id(int(key) if key.isdecimal() and len(key) < 10 else None, _CONFIG)] = AddedToken.read(entry, _CONFIG)
    return tokens


def _set_prefix(vocabulary: Vocabulary, tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Set whether a text gets a space in front. If both files exist, tokenizer.json wins, as in the library."""
    if tokenizer:
        vocabulary.space_prefix = space_prefix(tokenizer)
    elif isinstance(add_prefix := settings.get("add_prefix_space"), bool):
        vocabulary.space_prefix = add_prefix


def _specials(
    vocabulary: Vocabulary,
    added: Mapping[int, AddedToken],
    settings: Mapping[str, Any],
    older: Mapping[str, Any],
    model: Model,
) -> dict[str, int]:
    """Return the ids of special tokens, by their text in the tokenizer's files, else by number in config.json."""
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    ids |= {token.content: i for i, token in added.items() if i < len(vocabulary.tokens)}
    specials: dict[str, int] = {}
    for name, key in _SPECIAL.items():
        for source in (settings, older):
            entry = source.get(f"{name}_token")
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str) and text in ids:
                specials.setdefault(key, ids[text])
        value = model.config.value(f"{name}_token_id")
        number = value[0] if isinstance(value, list) and value else value
        if type(number) is int and 0 <= number < len(vocabulary.tokens):
            specials.setdefault(key, number)
    if vocabulary.model == "llama" and UNKNOWN in vocabulary.types:
        specials.setdefault("unknown", vocabulary.types.index(UNKNOWN))
    for text in _ENDS_OF_TURN:
        if text in ids and vocabulary.types[ids[text]] == CONTROL:
            specials.setdefault("eot", ids[text])
    return specials


def _around_pairs(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], specials: Mapping[str, int], sentencepiece: bool
) -> dict[str, bytes]:
    """Return the pairs that state whether a text gets a beginning and an end token.

    Raises ModelFileError if a token to add is unknown, because llama.cpp would abort.
    """
    single = _template(tokenizer.get("post_processor"))
    sequence = next((i for i, part in enumerate(single) if part == ""), 0)
    adds = {"bos": sequence > 0, "eos": sequence < len(single) - 1}
    if not single:
        adds = {"bos": sentencepiece, "eos": False}
    pairs = {}
    for name, add in adds.items():
        setting = settings.get(f"add_{name}_token")
        add = setting if isinstance(setting, bool) else add
        if add and name not in specials:
            raise ModelFileError(
                f"{_CONFIG}: every text gets {with_article(name)} token, but no file states which token it is"
            )
        pairs[f"tokenizer.ggml.add_{name}_token"] = encoded("bool", add)
    return pairs


def _template(processor: Any) -> list[str]:
    """Return the parts around a text: "special" for a special token, "" for the text. Empty if not specified."""
    if not isinstance(processor, dict):
        return []
    for inner in _list(processor.get("processors"), _TOKENIZER) or [processor]:
        if isinstance(inner, dict) and inner.get("type") == "TemplateProcessing":
            parts = [part for part in _list(inner.get("single"), _TOKENIZER) if isinstance(part, dict)]
            return ["" if "Sequence" in part else "special" for part in parts]
    return []


def _template_pairs(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the pair of the chat template, from any of its places, or {} for a base model."""
    raw = checkpoint.content("chat_template.jinja")
    template: Any = None
    if raw is not None:
        try:
            template = raw.decode()
        except UnicodeDecodeError as exc:
            raise ModelFileError(f"chat_template.jinja: this is not text in UTF-8: {exc}; download it again") from exc
    template = template or checkpoint.json("chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return {"tokenizer.chat_template": encoded("str", string(template, "the chat template"))} if template else {}


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | None):
        raise ModelFileError(f"{name}: it needs a list, but has {value!r:.60}; download it again")
    return value or []


def _id(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ModelFileError(f"{name}: {value!r:.60} is not a token id; download it again")
    return value


def read_sentencepiece(raw: bytes) -> Vocabulary:
    """Return the pieces of a sentencepiece model, not yet padded to the model's size.

    Raises ModelFileError if the file is damaged or was trained in another way, or if the package is not installed.
    """
    proto = _parsed(raw)
    if proto.trainer_spec.model_type != _BPE:
        raise ModelFileError(
            f"tokenizer.model: its type is {proto.trainer_spec.model_type}, but llama.cpp's tokenizer needs BPE, type 2"
        )
    tokens, types, scores = [], [], []
    for piece in proto.pieces:
        kind = _TYPES.get(piece.type, NORMAL)
        if not math.isfinite(piece.score):
            raise ModelFileError(f"tokenizer.model: piece {piece.piece!r:.60} has the score {piece.score}")
        text = string(piece.piece, "tokenizer.model")
        # llama.cpp looks for user-defined tokens in text that still has ordinary spaces.
        tokens.append(text.replace(SPACE, " ") if kind == USER_DEFINED else text)
        types.append(kind)
        scores.append(piece.score)
    return Vocabulary("llama", "default", tokens, types, scores, [], proto.normalizer_spec.add_dummy_prefix)


def _parsed(raw: bytes) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as exc:
        raise ModelFileError(
            'tokenizer.model: reading it needs the sentencepiece package; pip install "edge-runtime[quantize]"'
        ) from exc
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(raw)
    except DecodeError as exc:
        raise ModelFileError(f"tokenizer.model: this is not a sentencepiece model: {exc}; download it again") from exc
    if not proto.pieces:
        raise ModelFileError("tokenizer.model: it has no pieces; download it again")
    return proto
