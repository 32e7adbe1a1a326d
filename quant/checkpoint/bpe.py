"""Reads tokenizer.json: byte-level BPE, and the BPE form of a sentencepiece model, whose scores are restored."""

from collections.abc import Iterator, Mapping
from typing import Any

from quant.checkpoint.tokens import BYTE, NORMAL, SPACE, UNKNOWN, UNUSED, AddedToken, Vocabulary, string
from quant.errors import ModelFileError

_NAME = "tokenizer.json"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
# Regular expressions of tokenizer.json that split text into words, and llama.cpp's name for each.
_PRE = {
    (_CONTRACTIONS + _BEFORE + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END,): "llama-bpe",
    (_CONTRACTIONS + _BEFORE + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END,): "qwen2",
    (
        f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END,
    ): "tekken",
    ("GPT-2",): "gpt-2",
    ("digits", "GPT-2"): "smollm",
}


def is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether this tokenizer.json works on bytes, and not on characters as sentencepiece does."""
    return any(step.get("type") == "ByteLevel" for step in _steps(tokenizer.get("pre_tokenizer")))


def byte_level(tokenizer: Mapping[str, Any], added: Mapping[int, AddedToken], n_vocab: int) -> Vocabulary:
    """Return the vocabulary of a byte-level BPE, padded to `n_vocab`. Raises ModelFileError if llama.cpp lacks it."""
    model = _model(tokenizer)
    tokens, types = _tokens(model, added, n_vocab)
    merges = [" ".join(pair) for pair in _merges(model)]
    vocabulary = Vocabulary("gpt2", _pre(tokenizer), tokens, types, [], merges, False)
    vocabulary.fit(added, n_vocab)
    return vocabulary


def scored(tokenizer: Mapping[str, Any], added: Mapping[int, AddedToken], n_vocab: int) -> Vocabulary:
    """Return the vocabulary of a BPE that was made from a sentencepiece model, padded to `n_vocab`.

    The merges were made from the scores, best first. So the score of a token is the rank of the first merge that makes
    it.

    Raises ModelFileError if llama.cpp has no such tokenizer.
    """
    model = _model(tokenizer)
    if model.get("byte_fallback") is not True:
        raise ModelFileError(f"{_NAME}: it is neither byte-level BPE nor BPE with byte_fallback, which llama.cpp needs")
    for step in _steps(tokenizer.get("pre_tokenizer")):
        if step.get("type") != "Metaspace" and step.get("pattern") != {"String": " "}:
            raise ModelFileError(f"{_NAME}: its pre_tokenizer {step!r:.120} is not that of a sentencepiece model")
    tokens, types = _tokens(model, added, n_vocab)
    best: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(model)):
        best.setdefault(left + right, rank)
    scores = [-float(best.get(token, len(best))) for token in tokens]
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = BYTE
        elif token == model.get("unk_token"):
            types[i] = UNKNOWN
    vocabulary = Vocabulary("llama", "default", tokens, types, scores, [], space_prefix(tokenizer))
    vocabulary.fit(added, n_vocab)
    return vocabulary


def space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer puts a space in front of a text."""
    for step in _steps(tokenizer.get("normalizer")):
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            return True
    for step in _steps(tokenizer.get("pre_tokenizer")):
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return False


def _model(tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise ModelFileError(f"{_NAME}: its model is {kind!r:.40}, but llama.cpp needs BPE with a vocab")
    return model


def _tokens(model: Mapping[str, Any], added: Mapping[int, AddedToken], n_vocab: int) -> tuple[list[str], list[int]]:
    """Return (texts, types) of the trained tokens by id. Ids without a token are of type UNUSED."""
    ids: dict[int, str] = {}
    for text, number in model["vocab"].items():
        if type(number) is not int or not 0 <= number < 1 << 24 or number in ids:
            raise ModelFileError(f"{_NAME}: token {text!r:.60} has the id {number!r:.40}; download it again")
        if number >= n_vocab and number not in added:
            raise ModelFileError(f"{_NAME}: token {number} is beyond config.json's vocab_size, {n_vocab}")
        ids[number] = string(text, _NAME)
    size = min(n_vocab, max(ids, default=-1) + 1)
    return [ids.get(i, f"[PAD{i}]") for i in range(size)], [NORMAL if i in ids else UNUSED for i in range(size)]


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the pairs to merge, in order. Older files write a pair as one string."""
    merges = model.get("merges")
    if not isinstance(merges, list) or not merges:
        raise ModelFileError(f"{_NAME}: it has no merges; download it again")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise ModelFileError(f"{_NAME}: merge {merge!r:.60} is not a pair of texts; download it again")
        yield string(pair[0], _NAME), string(pair[1], _NAME)


def _pre(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way this tokenizer splits words."""
    patterns: list[str] = []
    for step in _steps(tokenizer.get("pre_tokenizer")):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Split" and isinstance(pattern, dict):
            patterns.append(str(pattern.get("Regex", pattern.get("String"))))
        elif kind == "Digits" and step.get("individual_digits") is True:
            patterns.append("digits")
        elif kind == "ByteLevel" and step.get("add_prefix_space") is not True:
            patterns += ["GPT-2"] if step.get("use_regex", True) else []
        else:
            patterns.append(f"{kind} {step}")
    name = _PRE.get(tuple(patterns))
    if name is None:
        raise ModelFileError(
            f"{_NAME}: its pre_tokenizer is not known ({' then '.join(patterns):.200}); known ones are those of "
            f"{', '.join(_PRE.values())}"
        )
    return name


def _steps(value: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre_tokenizer. A Sequence is replaced by the steps that it contains."""
    steps, left = [], [value]
    while left:
        step = left.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence":
            inner = step.get("pretokenizers") or step.get("normalizers")
            left += reversed(inner) if isinstance(inner, list) else []
        elif isinstance(step, dict):
            steps.append(step)
    return steps
