"""Client of a server with the OpenAI API: `edge serve` or another one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from edge.net.server_client import ServerClient, error_message
from transport.errors import TransportError

SILENT_S = 300.0  # timeout between two signs of life of a stream; `edge serve` sends one every ten seconds
_MOST_LINE_BYTES = 16 << 20


class ServerChat:
    """A conversation with a server. Each question sends the whole conversation."""

    def __init__(
        self, url: str, *, key: str | None = None, model: str | None = None, system: str | None = None
    ) -> None:
        """url: address of the server, with or without /v1
        key: API key, sent only to this server
        model: the server's name of the model; None: the server's own choice

        Raises ValueError if `url` is not a URL, or contains a name or password.
        """
        self._server, self._model = ServerClient(url, key), model
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.attached: list[dict[str, Any]] = []  # parts at the start of the next question
        self.usage: dict[str, Any] | None = None  # usage of the last answer, as reported by the server
        self.finish_reason: str | None = None  # "repetition" if a server such as `edge serve` reports it as `ended_by`

    def ask(self, text: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Ask a question, and yield (piece of text, reasoning before it) as the answer arrives.

        The question and the received part of the answer join the conversation. A question without any answer does not,
        and its attachments stay for the next question.

        options: fields of the request, such as temperature

        Raises TransportError with the server's message.
        """
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        messages = [*self.messages, {"role": "user", "content": content}]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body: dict[str, Any] = {"messages": messages, **stream, **options}
        if self._model is not None:
            body["model"] = self._model
        chunks: list[str] = []
        self.usage = self.finish_reason = None
        try:
            for event in self._events(body):
                self.usage = event.get("usage") or self.usage
                for choice in event.get("choices", ()):
                    self.finish_reason = choice.get("ended_by") or choice.get("finish_reason") or self.finish_reason
                    delta = choice.get("delta", {})
                    piece, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
                    if piece:
                        chunks.append(piece)
                    if piece or thought:
                        yield piece, thought
        finally:
            if chunks:
                self.messages = [*messages, {"role": "assistant", "content": "".join(chunks)}]
                self.attached = []

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with (
            suppress(http.client.IncompleteRead),
            self._server.response("/v1/chat/completions", SILENT_S, body, "text/event-stream") as response,
        ):
            while line := response.readline(_MOST_LINE_BYTES):
                if not line.startswith(b"data:"):
                    continue  # a sign of life, or the end of an event
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if not _is_chunk(event):
                    raise ValueError("it sent an event that does not belong to the OpenAI API")
                if "error" in event:
                    raise TransportError(f"{self._server.where}: {error_message(event)}")
                yield event
        raise TransportError(f"{self._server.where} ended before the answer was complete")


def _is_chunk(event: Any) -> bool:
    """Return whether the used parts of an event have the API's types."""
    if not isinstance(event, dict) or not isinstance(choices := event.get("choices", []), list):
        return False
    deltas = [choice.get("delta", {}) if isinstance(choice, dict) else None for choice in choices]
    return all(
        isinstance(delta, dict)
        and all(isinstance(delta.get(name) or "", str) for name in ("content", "reasoning_content"))
        for delta in deltas
    )
