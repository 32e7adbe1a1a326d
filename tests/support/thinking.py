"""The bundled model as a reasoning model: with such a template, and with tokens for the marks of its reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.llm.sampler import TokenSampler
from edge.models.demo import MODEL_PATH
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, encoded, header

END = 4  # the token that ends the bundled model's turn
OPENS, CLOSES = 2046, 2047  # tokens of marks in `thinker`
_CONTROL = 3
# As published ones: a thought stays in the prompt only behind the last question, and the prompt opens the next.
TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
NAMES_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"  # before a template: it writes tools
# One that leaves it to the model whether a thought opens.
UNOPENED = TEMPLATE.replace("{% else %}{{ '<think>\\n' }}{% endif %}", "{% endif %}")


def thinker(path: Path, template: str = TEMPLATE, marks: Mapping[int, str] = MappingProxyType({})) -> Path:
    """Write the bundled model with this template, and with control tokens for `<think>`, `</think>`, and these marks,
    by their ids."""
    file = GgufFile.open(MODEL_PATH)
    pairs = {key: file.raw_value(key) for key in file.metadata}
    tokens, types = (list(file.metadata[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))  # type: ignore[arg-type]
    for token, mark in {OPENS: "<think>", CLOSES: "</think>", **marks}.items():
        tokens[token], types[token] = mark, _CONTROL
    pairs["tokenizer.ggml.tokens"] = encoded("arr[str]", tokens)
    pairs["tokenizer.ggml.token_type"] = encoded("arr[i32]", types)
    pairs["tokenizer.chat_template"] = encoded("str", template)
    merges = [merge for merge in file.metadata["tokenizer.ggml.merges"] if str(merge).replace(" ", "") in set(tokens)]  # type: ignore[union-attr]
    pairs["tokenizer.ggml.merges"] = encoded("arr[str]", merges)
    tensors = [NewTensor(name, tensor.shape, tensor.type) for name, tensor in file.tensors.items()]
    with path.open("wb") as out:
        out.write(header(pairs, tensors))
        for tensor in tensors:
            out.write(bytes(file.data(tensor.name)) + bytes(tensor.padding))
    return path


@contextmanager
def says(tokens: Sequence[int]) -> Iterator[None]:
    """The samplers of the block draw these tokens, whatever the logits are; where the logits of a constraint forbid
    the next of them, they draw as ever. A token that ends a turn is drawn once."""
    script: dict[int, list[int]] = {}
    draw = TokenSampler._choice

    def choice(self: TokenSampler, logits: NDArray[np.float32]) -> int:
        rest = script.setdefault(id(self), list(tokens))
        if not rest or logits[rest[0]] == -np.inf:
            return draw(self, logits)
        return rest.pop(0) if rest[0] == END else rest[0]

    def accept(self: TokenSampler, token: int, *, generated: bool = True) -> None:
        rest = script.get(id(self))
        if rest and rest[0] == token:
            rest.pop(0)
        note(self, token, generated=generated)

    note = TokenSampler.accept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenSampler, "_choice", choice)
        patch.setattr(TokenSampler, "accept", accept)
        yield
