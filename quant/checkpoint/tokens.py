"""A vocabulary for a GGUF: its tokens with their types, and scores or merges."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quant.errors import ModelFileError
from quant.gguf.writer import encoded

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's numbers of token types
SPACE = "\u2581"  # sentencepiece's character for a space
_ADDED_SCORE = -1000.0  # score of tokens that are found before anything is merged
_UNUSED_SCORE = -10000.0


class AddedToken(NamedTuple):
    """A token that the tokenizer looks for in the text before anything else."""

    content: str
    special: bool

    @classmethod
    def read(cls, entry: Any, name: str) -> "AddedToken":
        """Return the token that an entry of the JSON file `name` describes. Raises ModelFileError if it has none."""
        if not isinstance(entry, dict):
            raise ModelFileError(f"{name}: an added token is {entry!r:.60}, but must be an object; download it again")
        return cls(string(entry.get("content"), name), entry.get("special") is True)

    @property
    def type(self) -> int:
        """Type of the token. Control tokens that a file does not mark as special are recognized by their text."""
        text = self.content
        looks_special = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
            text.startswith(start) and text.endswith(end)
            for start, end in (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
        )
        return CONTROL if self.special or looks_special else USER_DEFINED


@dataclass(slots=True)
class Vocabulary:
    """Tokens by id."""

    model: str  # llama.cpp's tokenizer: "llama" or "gpt2"
    pre: str  # way of splitting text into words
    tokens: list[str]
    types: list[int]
    scores: list[float]  # for "llama"; otherwise empty
    merges: list[str]  # for "gpt2"; otherwise empty
    space_prefix: bool  # a text gets a space in front

    def fit(self, added: Mapping[int, AddedToken], n_vocab: int) -> None:
        """Add the added tokens, and fill up with unused tokens to `n_vocab`.

        Added tokens from `n_vocab` on have no row in the model and are left out.

        Raises ModelFileError if a trained token has an id of `n_vocab` or more.
        """
        if len(self.tokens) > n_vocab:
            beyond = [i for i in range(n_vocab, len(self.tokens)) if i not in added]
            if beyond:
                raise ModelFileError(
                    f"token {beyond[0]} of the tokenizer is beyond config.json's vocab_size, {n_vocab}"
                )
            for values in (self.tokens, self.types, self.scores):
                del values[n_vocab:]
        for i in range(len(self.tokens), n_vocab):
            self.tokens.append(f"[PAD{i}]")
            self.types.append(UNUSED)
            if self.model == "llama":
                self.scores.append(_UNUSED_SCORE)
        for i, token in added.items():
            if i >= n_vocab:
                continue
            content = token.content
            if self.types[i] != UNKNOWN:
                self.types[i] = token.type
            if self.model == "llama":
                self.scores[i] = _ADDED_SCORE
                if self.types[i] == USER_DEFINED:  # llama.cpp looks for it in text that still has ordinary spaces
                    content = content.replace(SPACE, " ")
            self.tokens[i] = content

    def check(self) -> None:
        """Raise ModelFileError if llama.cpp would abort: a text occurs twice, or no token spells some byte."""
        # llama.cpp reads a text up to its first zero byte, and numbers texts that are empty then.
        texts = (text.partition("\0")[0] or f"[EMPTY_{i}]" for i, text in enumerate(self.tokens))
        text, times = Counter(texts).most_common(1)[0]
        if times > 1:
            raise ModelFileError(f"the tokenizer has {times} tokens {text!r:.60}, but llama.cpp needs each text once")
        if self.model == "llama":
            missing = {f"<0x{byte:02X}>" for byte in range(256)} - set(self.tokens)
            if missing:
                raise ModelFileError(
                    f"the tokenizer has no token {min(missing)}, but llama.cpp needs a token for every byte"
                )

    def pairs(self) -> dict[str, bytes]:
        """Return the key-value pairs of the tokens."""
        pairs = {
            "tokenizer.ggml.model": encoded("str", self.model),
            "tokenizer.ggml.pre": encoded("str", self.pre),
            "tokenizer.ggml.tokens": encoded("arr[str]", self.tokens),
            "tokenizer.ggml.token_type": encoded("arr[i32]", self.types),
        }
        if self.model == "llama":
            pairs["tokenizer.ggml.scores"] = encoded("arr[f32]", self.scores)
            pairs["tokenizer.ggml.add_space_prefix"] = encoded("bool", self.space_prefix)
        else:
            pairs["tokenizer.ggml.merges"] = encoded("arr[str]", self.merges)
        return pairs


def string(value: Any, name: str) -> str:
    """Return `value` if it is a string that UTF-8 can encode. Raises ModelFileError otherwise."""
    if not isinstance(value, str):
        raise ModelFileError(f"{name}: {value!r:.60} is not a string; download it again")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ModelFileError(f"{name}: {value!a:.60} is half a character; download it again") from None
    return value
