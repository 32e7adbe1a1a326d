"""Prompts that score a document for a query, in the form that the reranker was trained with."""

from __future__ import annotations

import re

from edge.errors import ContextFull
from edge.llama.llama import Model
from edge.serve.engine.texts import Tokenizer
from quant.gguf.file import GgufFile

_TEMPLATE = "tokenizer.chat_template.rerank"
_PLACES = re.compile(r"\{(query|document)\}")


class RankingPrompts:
    """Creates reranking prompts for one model. Any thread may use it."""

    def __init__(self, model: Model, file: GgufFile, tokenizer: Tokenizer) -> None:
        """file: GGUF file of the model."""
        self._tokenizer = tokenizer
        template = file.metadata.get(_TEMPLATE)
        self._parts = _parts(model, template) if isinstance(template, str) else _plain_parts(model)

    def tokens(self, query: str, document: str, most: int) -> list[int]:
        """Return the token ids of a prompt. Names of control tokens in the texts do not become these tokens.

        most: maximum tokens. Raises ContextFull if the prompt has more.
        """
        texts = {"query": query, "document": document}
        tokens: list[int] = []
        for part in self._parts:
            if isinstance(part, int):
                tokens.append(part)
            elif text := _PLACES.sub(lambda place: texts[place[1]], part):
                tokens += self._tokenizer.tokenize(text, most, add_special=False)
        if len(tokens) > most:
            raise ContextFull(f"{len(tokens)} tokens, at most {most} are allowed; send shorter texts")
        return tokens


def _plain_parts(model: Model) -> list[int | str]:
    """Return placeholders of both texts, with the special tokens that the vocabulary adds around them."""
    end = model.added("eos")
    return [*model.added("bos"), "{query}", *end, *model.added("sep"), "{document}", *end]


def _parts(model: Model, template: str) -> list[int | str]:
    """Return the control tokens of a template, and the texts between them."""
    parts: list[int | str] = []
    rest = template
    for token in model.tokenize(template, add_special=False, parse_special=True):
        if model.is_control(token):
            text, _, rest = rest.partition(model.piece(token, special=True).decode(errors="replace"))
            parts += [text, token]
    return [*parts, rest]
