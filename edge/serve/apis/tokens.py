"""/tokenize, /detokenize and /apply-template of llama.cpp's server, and token counting of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from edge.media.marks import without_marks
from edge.serve.apis.chat import ChatRequest
from edge.serve.apis.chat import parse as parse_chat
from edge.serve.apis.completions import TokenId
from edge.serve.apis.fields import Fields, Items
from edge.serve.apis.messages_fields import MessagesInput, conversation_of, media_of
from edge.serve.http.errors import BadRequest
from edge.serve.parsing import parsed as in_thread
from edge.serve.served import ServedModel

# Limits of texts to tokenize or count. They may exceed a context; a million tokens take about a second.
MOST_CHARACTERS = 4 << 20
MOST_TOKENS = 1 << 20


class TokenizeRequest(Fields):
    model: str | None = None
    content: str = Field(max_length=MOST_CHARACTERS)
    add_special: bool = Field(False, description="add the tokens that begin and end a text")
    parse_special: bool = Field(True, description="convert names of special tokens to these tokens")
    with_pieces: bool = Field(False, description="return each token with its text, or its bytes if they are not UTF-8")

    other_names: ClassVar[Mapping[str, str]] = {  # names in vLLM
        "prompt": "content", "add_special_tokens": "add_special", "return_token_strs": "with_pieces",
    }  # fmt: skip


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Items[TokenId] = Field(max_length=MOST_TOKENS)


async def tokenize(request: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    special = {"add_special": request.add_special, "parse_special": request.parse_special}
    tokens = await model.tokenize(request.content, **special)
    if not request.with_pieces:
        return {"tokens": tokens}
    pieces = await model.pieces(tokens)
    with_pieces = [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]
    return {"tokens": with_pieces}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """Return the text of tokens. Invalid bytes become U+FFFD."""
    return {"content": b"".join(await model.pieces(request.tokens)).decode("utf-8", "replace")}


async def apply_template(request: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """Return the prompt of a chat."""
    about = await model.about()
    [generation, *_] = (await in_thread(parse_chat, request, str(about["chat_template"] or ""))).generations
    prompt = await model.render(generation.messages or (), generation.tools, generation.variables, generation.think)
    return {"prompt": _short(prompt if about.get("takes_media") else without_marks(prompt, generation.stand_ins))}


async def count_tokens(request: MessagesInput, model: ServedModel) -> dict[str, Any]:
    """Return the number of tokens in a conversation's prompt. Raises BadRequest if the model sees pictures in it."""
    about, media = await model.about(), media_of(request)
    if (about.get("takes_media") and media.files) or media.files.keys() - media.stand_ins.keys():
        raise BadRequest("tokens of pictures are unknown until they are encoded; count only the text", "messages")
    parsed = await in_thread(conversation_of, request, str(about["chat_template"] or ""))
    prompt = await model.render(parsed.messages, parsed.tools, parsed.variables, parsed.think)
    prompt = _short(without_marks(prompt, media.stand_ins))
    plain = await model.tokenize(prompt, add_special=False, parse_special=True)
    full = await model.tokenize(prompt, add_special=True, parse_special=True)
    # If the template writes the BOS token itself, it counts only once.
    return {"input_tokens": len(plain if plain[:1] == full[:1] else full)}


def _short(prompt: str) -> str:
    """Return the prompt. Raises BadRequest if it is too long to return or count."""
    if len(prompt) > MOST_CHARACTERS:
        raise BadRequest(f"the prompt has {len(prompt)} characters, at most {MOST_CHARACTERS} are allowed", "messages")
    return prompt


async def template_of(model: ServedModel) -> str:
    return str((await model.about())["chat_template"] or "")
