"""A conversation: messages, the template that turns them into a prompt, and the scheduler that answers it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from devices.files import make_private, write_whole
from devices.paths import state_folder
from edge.arguments import checked
from edge.errors import ChatFileError, EngineError
from edge.llm.continuation import PrefillProgress, Request
from edge.llm.generate import Response, generate
from edge.llm.interface import Drafter, TextEngine
from edge.llm.model import Model
from edge.llm.pieces import Pieces
from edge.llm.requests import windowed
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import common_prefix
from edge.media.encoder import MediaEncoder
from edge.media.media import behind
from edge.media.prompt import ChatMedia, tokens_with
from edge.text.templates.process import TemplateProcess
from edge.text.templates.template import ChatTemplate, Message
from edge.text.thinking_format import AUTO
from edge.text.thinking_tracker import Thinking
from edge.weights.adapter import scales_by_name

ROLES = ("system", "user", "assistant")
_FORMAT = "edge-chat-1"

WhenFull = Literal["shift", "forget", "stop"]
"""Handling of a full context window. shift: the oldest tokens are dropped in place, also during an answer. forget: the
oldest exchanges are left out and the rest is computed again; an answer ends where the context does. stop: nothing is
left out.
"""


class Chat:
    """A conversation with a model. Only tokens that are not in the KV cache yet are computed."""

    @checked
    def __init__(
        self,
        model: Model | TextEngine,
        *,
        system: str | None = None,
        template: str | None = None,
        renderer: TemplateProcess | None = None,
        when_full: WhenFull | None = None,
        drafter: Drafter | None = None,
        think: int = AUTO,
        encoder: MediaEncoder | None = None,
    ) -> None:
        """template: Jinja source to use instead of the model's own.
        renderer: a process for it that was started before; by default, one is started.
        when_full: handling of a full context; None: "shift" if the model can, otherwise "forget".
        drafter: drafts tokens of answers; by default, the model's own, if it has one.
        think: maximum tokens of a thought before an answer; 0: no thought; -1: the template decides, without a
            limit.
        encoder: encoder of pictures and sounds.

        Raises TemplateError if the template is invalid, EngineError if the model cannot "shift", ValueError for
        another word or number.
        """
        engine = model.engine if isinstance(model, Model) else model
        if when_full not in (None, *get_args(WhenFull)):
            raise ValueError(f"when_full is {', '.join(get_args(WhenFull))} or None, not {when_full!r}")
        if when_full in ("forget", "stop") and engine.attention_window is not None:
            raise EngineError(f"an attention window drops the oldest tokens in place; leave out when_full {when_full}")
        if when_full == "shift" and not engine.can_shift:
            raise EngineError(
                f"{engine.path.name} cannot shift its context: it has attention windows, recurrent layers or positions"
                " that are not rotations; use forget or stop"
            )
        self.engine = engine
        self.drafter = model.drafter if isinstance(model, Model) and drafter is None else drafter
        if think < AUTO:
            raise ValueError(f"think is a number of tokens, 0 or -1, not {think}")
        self.think = think
        self.adapters = {adapter.name: adapter.scale for adapter in engine.adapters}  # adapter scales by name
        self.when_full: WhenFull = when_full or ("shift" if engine.can_shift else "forget")
        self._scheduler = Scheduler(engine, slots=1, keep=True, drafter=self.drafter)
        self.dropped = 0  # messages forgotten by the last `ask` because the context was full
        bos, eos = (self._special(name) for name in ("bos", "eos"))
        if template is not None:
            self._template = ChatTemplate(template, bos=bos, eos=eos, process=renderer)
        else:
            self._template = ChatTemplate.for_model(engine.file.metadata, bos, eos, renderer)
        self._bos = bos
        self.messages: list[dict[str, str]] = []
        self.document = ""  # text before the first question
        self._media = ChatMedia(encoder)
        self.system = system

    def __repr__(self) -> str:
        return f"<edge.Chat with {self.engine.path.name}, messages: {len(self.messages)}>"

    @property
    def system(self) -> str | None:
        """The system message, which is the first message of the conversation."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    @property
    def context_used(self) -> int:
        """Tokens of the context in use."""
        return self._scheduler.slots.n_cached

    def clear(self) -> None:
        """Forget the conversation and its pictures, keep the system message."""
        self._media.clear()
        self.messages = self.messages[:1] if self.system is not None else []

    @property
    def last_question(self) -> str | None:
        """The last message of the user, or None."""
        place = self._last_question()
        return None if place is None else self.messages[place]["content"]

    def undo(self) -> str | None:
        """Remove the last question and everything after it. Return the question, or None if there is none."""
        question, place = self.last_question, self._last_question()
        self.messages = self.messages[:place]
        return question

    def _last_question(self) -> int | None:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        return places[-1] if places else None

    @checked
    def ask(
        self,
        text: str | Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_prefill: PrefillProgress | None = None,
    ) -> Pieces[Response]:
        """Add a user message and generate the answer. The generated part of the answer joins the messages.

        text: the message; or a whole conversation that replaces this one, as messages with `role` and `content`, the
        last one of the role "user".
        If the context is full, the oldest exchanges are dropped, unless `when_full` is "stop"; `dropped` counts
        their messages. Raises ContextFull if not even this message fits; the conversation then stays as it was. Raises
        ValueError if `text` is a list that is no such conversation.
        max_tokens: None: until the context is full; with "shift" as many tokens as a context holds.
        """
        earlier = self.messages
        if not isinstance(text, str):
            *earlier, question = _conversation(text)
            text = question["content"]
        messages = [*earlier, {"role": "user", "content": self._media.attached + text}]
        return Pieces(self._answer(messages, sampling, max_tokens, stop, on_prefill), self.engine)

    @checked
    def attach(self, data: bytes) -> int:
        """Attach a picture or sound, the bytes of a file, to the next question. Return its number of tokens. Raises
        MediaError if the file is invalid."""
        return self._media.attach(data)

    def detach(self) -> None:
        """Remove the pictures and sounds attached to the next question."""
        self._media.attached = ""

    @checked
    def retry(
        self,
        text: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_prefill: PrefillProgress | None = None,
    ) -> Pieces[Response]:
        """Answer the last question again, or `text` instead of it. The new exchange replaces the last one.

        The same seed gives the same answer again. If no answer comes, the conversation stays as it was. Raises
        ValueError if there is no question, and the errors of `ask`.
        """
        place = self._last_question()
        if place is None:
            raise ValueError("there is no question to answer again")
        question = self.messages[place]["content"] if text is None else text
        messages = [*self.messages[:place], {"role": "user", "content": question}]
        return Pieces(self._answer(messages, sampling, max_tokens, stop, on_prefill), self.engine)

    def _answer(
        self,
        messages: list[dict[str, str]],
        sampling: SamplingParams | None,
        max_tokens: int | None,
        stop: Sequence[str],
        on_prefill: PrefillProgress | None,
    ) -> Generator[Response, None, None]:
        """Answer the last of `messages`. If an answer comes, the messages and the answer become the conversation."""
        before, self.messages = self.messages, messages
        self.dropped = 0
        pieces: list[str] = []
        thoughts: list[str] = []
        try:
            fitting, prompt, is_whole = self._fitting()
            shifts = self.when_full == "shift"
            if shifts and max_tokens is None:
                max_tokens = self.engine.context  # an answer that drops its own beginning might never end
            sampling = sampling or SamplingParams()
            request = Request(
                prompt,
                max_tokens,
                sampling,
                stop=(*(() if sampling.ignore_eos else self._template.stops), *stop),
                thinking=self._thinking(),
                adapters=scales_by_name(self.engine.adapters, self.adapters),
                on_prefill=on_prefill,
                in_place=shifts and not is_whole,
                stays=(lambda: self._beginning(prompt)) if shifts else None,
                media=self._media.rows_in(fitting),
            )
            for response in generate(self._scheduler, request):
                if not pieces:  # only now it is certain that there is an answer
                    self._media.answered(messages[-1]["content"])
                    self.dropped = len(self.messages) - len(fitting)
                    self.messages = fitting
                pieces.append(response.text)
                thoughts.append(response.thought)
                yield response
        finally:
            answer, thought = "".join(pieces), "".join(thoughts)
            if answer:
                own = {"reasoning_content": thought} if thought else {}
                self.messages.append({"role": "assistant", "content": answer, **own})
            else:
                self.messages = before  # a question without an answer would confuse the next one

    def prompt_tokens(self) -> list[int]:
        """Return the token ids of the whole conversation, ready for the model to answer."""
        return self._tokens(self.messages)

    def _thinking(self) -> Thinking | None:
        """Return the thinking settings of the next answer, or None if the template has no thoughts."""
        if self._template.thinking is None:
            return None
        return Thinking.from_prompt(self._rendered(self.messages[-1:]), self._template.thinking, self.think)

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self._template.render(self._with_document(messages), think=self.think)

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        text = self._rendered(messages)
        adds_bos = not (self._bos and text.startswith(self._bos))

        def tokenize(part: str, is_first: bool) -> list[int]:
            return self.engine.model.tokenize(part, add_special=is_first and adds_bos, parse_special=True)

        return tokens_with(text, self._media.in_messages(messages), tokenize)[0]

    def _with_document(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, with the document put before the first question among them."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if not self.document or first is None:
            return messages
        question = {"role": "user", "content": f"{self.document}\n\n{messages[first]['content']}"}
        return [*messages[:first], question, *messages[first + 1 :]]

    def _fitting(self) -> tuple[list[dict[str, str]], list[int], bool]:
        """Return (messages to keep, their prompt, True if all messages are kept).

        The oldest exchanges are left out if they leave no room for an answer. Then half the room is cleared, because
        each removal means to recompute the rest of the prompt, or is an approximation.
        """
        if (window := self.engine.attention_window) is not None:
            prompt = self.prompt_tokens()
            return self.messages, prompt, windowed(prompt, window) is prompt
        if self.when_full == "stop":
            return self.messages, self.prompt_tokens(), True
        room = self.engine.context - min(256, self.engine.context // 4)
        first = 0 if self.system is None else 1
        for oldest in range(first, len(self.messages), 2):
            messages = self.messages[:first] + self.messages[oldest:]
            prompt = self._tokens(messages)
            if len(prompt) <= room:
                break
            if oldest == first:
                room //= 2
        is_alone = len(messages) == first + 1 < len(self.messages)
        if is_alone and len(prompt) <= room and self.when_full == "shift":  # the end of a long exchange still fits
            messages = self.messages[:first] + self.messages[max(first, len(self.messages) - 3) :]
            prompt = self._tokens(messages)
            beginning = self._beginning(prompt)
            prompt = prompt[:beginning] + prompt[behind(prompt, len(prompt) - (room - beginning)) :]
        # The last message alone may still fit, with less room for its answer.
        return messages, prompt, not is_alone and len(messages) == len(self.messages)

    def _beginning(self, prompt: Sequence[int]) -> int:
        """Return the number of prompt tokens before the first question: the system message and the document."""
        system = self.messages[: 0 if self.system is None else 1]
        return common_prefix(prompt, self._tokens([*system, {"role": "user", "content": "?"}]))

    def _special(self, name: str) -> str:
        token = self.engine.model.special_token(name)
        return "" if token is None else self.engine.model.piece(token, special=True).decode(errors="replace")

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages and the document as JSON to a new file, or over a saved chat.

        Raises ChatFileError if another kind of file has this name, OSError if writing fails. Nothing changes then.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it, or save elsewhere")
        if path.is_symlink() or path.exists():
            try:
                _saved(path)
            except (ChatFileError, OSError) as error:
                raise ChatFileError(
                    f"{path} exists and is not a saved chat, so it is not overwritten; use another name"
                ) from error
        messages = self._media.without(self.messages)
        saved = {"format": _FORMAT, "messages": messages, **({"document": self.document} if self.document else {})}
        text = json.dumps(saved, ensure_ascii=False, indent=1)
        try:
            # Half of a surrogate pair has no bytes in UTF-8, so it stays an escape sequence.
            write_whole(path, (text + "\n").encode(errors="backslashreplace"))
        except OSError as error:  # the original message names a temporary file
            raise OSError(f"{path}: cannot be saved: {error.strerror or error}") from error

    @checked
    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the messages and the document by saved ones. Raises ChatFileError if the file is not a saved
        chat, and OSError if it cannot be read.
        """
        path = Path(path)
        try:
            self.messages, self.document = _saved(path)
        except OSError as error:
            raise OSError(f"{path}: cannot be read: {error.strerror or error}") from error


def _conversation(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return copies of the messages of a conversation that ends with a question. Raises ValueError otherwise."""
    copies = [dict(message) for message in messages]
    if not all(isinstance(copy.get(key), str) for copy in copies for key in ("role", "content")):
        raise ValueError("each message needs a role and a content that are texts")
    if not copies or copies[-1]["role"] != "user":
        raise ValueError(
            f"the last message must have the role 'user', got {copies[-1]['role'] if copies else 'none'!r}"
        )
    return copies


def conversation_path(name: str) -> Path:
    """Return the path of a named conversation that is kept between programs. Raises ChatFileError for an invalid
    name.
    """
    if not re.fullmatch(r"[\w][\w .-]{0,79}", name):
        raise ChatFileError(
            f"a conversation cannot be called {name!r:.90}: use up to 80 letters, digits, spaces and ._-, the first of"
            " them a letter or a digit"
        )
    folder = state_folder() / "conversations"
    make_private(folder)
    return folder / f"{name}.json"


def _saved(path: Path) -> tuple[list[dict[str, str]], str]:
    """Return the messages and the document in a file."""
    if not path.is_file() and path.exists():
        raise ChatFileError(f"{path}: not a saved chat: not a file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: not a saved chat: it is not JSON in UTF-8") from error
    messages, document = _checked_messages(data, path), data.get("document", "")
    if not isinstance(document, str):
        raise ChatFileError(f"{path}: not a saved chat: its document is not a text")
    return messages, document


def _checked_messages(data: Any, path: Path) -> list[dict[str, str]]:
    messages = data.get("messages") if isinstance(data, dict) and data.get("format") == _FORMAT else None
    if not isinstance(messages, list):
        raise ChatFileError(f"{path}: not a saved chat: it needs format {_FORMAT!r} and a list of messages")
    for i, m in enumerate(messages):
        if not (isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str)):
            raise ChatFileError(f"{path}: message {i} needs a role of {', '.join(ROLES)} and a text as content")
        if not isinstance(m.get("reasoning_content", ""), str):
            raise ChatFileError(f"{path}: message {i}: its reasoning_content is not a text")
    return [{key: m[key] for key in ("role", "content", "reasoning_content") if key in m} for m in messages]
