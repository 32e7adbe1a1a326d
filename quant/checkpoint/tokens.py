"""A vocabulary for a GGUF: its tokens with their types, and scores or merges."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quant.errors import ModelFileError
from quant.gguf.writer import encoded

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types, as llama.cpp numbers them
SPACE = "\u2581"  # how sentencepiece writes one
_ADDED_SCORE = -1000.0  # of tokens that are found before anything is merged
_UNUSED_SCORE = -10000.0


class AddedToken(NamedTuple):
    """A token that is looked for in the text before anything else."""

    content: str
    special: bool

    @classmethod
    def read(cls, entry: Any, name: str) -> "AddedToken":
        """The token that an entry of a JSON file called `name` describes. ModelFileError if it describes none."""
        if not isinstance(entry, dict):
            raise ModelFileError(f"{name}: an added token is {entry!r:.60}, needed is an object; download it again")
        return cls(string(entry.get("content"), name), entry.get("special") is True)

    @property
    def type(self) -> int:
        """Type of the token. Some files do not mark control tokens as special; those are recognized by their text."""
        text = self.content
        looks_special = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
            text.startswith(start) and text.endswith(end)
            for start, end in (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
        )
        return CONTROL if self.special or looks_special else USER_DEFINED


@dataclass(slots=True)
class Vocabulary:
    """Tokens by id."""

    model: str  # of llama.cpp's tokenizers: "llama" or "gpt2"
    pre: str  # how text is cut into words first
    tokens: list[str]
    types: list[int]
    scores: list[float]  # of "llama"; else empty
    merges: list[str]  # of "gpt2"; else empty
    space_prefix: bool  # whether a text gets a space in front

    def fit(self, added: Mapping[int, AddedToken], n_vocab: int) -> None:
        """Put in added tokens, and fill up with unused ones to `n_vocab`.

        Added tokens beyond have no row in the model and are left out. ModelFileError for trained ones beyond.
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
                if self.types[i] == USER_DEFINED:  # found in text whose spaces are still spaces
                    content = content.replace(SPACE, " ")
            self.tokens[i] = content

    def check(self) -> None:
        """Raise ModelFileError for what llama.cpp stops the process at: a text twice, a byte that no token spells."""
        # llama.cpp reads a text up to its first zero byte, and numbers what is empty then.
        texts = (text.partition("\0")[0] or f"[EMPTY_{i}]" for i, text in enumerate(self.tokens))
        text, times = Counter(texts).most_common(1)[0]
        if times > 1:
            raise ModelFileError(f"the tokenizer has {times} tokens {text!r:.60}; llama.cpp needs each text once")
        if self.model == "llama":
            missing = {f"<0x{byte:02X}>" for byte in range(256)} - set(self.tokens)
            if missing:
                raise ModelFileError(
                    f"the tokenizer has no token {min(missing)}; llama.cpp needs a vocabulary that can spell every byte"
                )

    def pairs(self) -> dict[str, bytes]:
        """The key-value pairs of the tokens."""
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
    """`value`, which must be a string that UTF-8 can write. ModelFileError otherwise."""
    if not isinstance(value, str):
        raise ModelFileError(f"{name}: {value!r:.60} is not a string; download it again")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ModelFileError(f"{name}: {value!a:.60} is half a character; download it again") from None
    return value
