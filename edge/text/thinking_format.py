"""Thinking formats: the marks around a model's thoughts, detected in the source of its chat template.

A thought stands between two marks, usually `<think>` and `</think>`. At the end of the prompt, a template may open a
thought, leave that to the model, or open and close an empty thought to turn thinking off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["start", "thought", "answer"]
"""State of an answer. start: the answer is still empty, and a thought may open. thought: inside a thought. answer: the
text of the answer has begun."""

# Thinking budget in tokens. -1 (AUTO): the template decides, without a limit. 0: no thinking.
AUTO = -1


@dataclass(frozen=True)
class ThinkingFormat:
    """Marks around thoughts and answers. They belong to neither."""

    opens: str  # mark that begins a thought
    closes: str  # mark that ends a thought
    headers: tuple[str, ...] = ()  # marks that begin the answer; the first one begins a plain answer
    skipped: tuple[str, ...] = ()  # other marks around answers
    between: str = ""  # text between a thought and the header of its answer
    again: bool = False  # a thought may also follow a part of the answer
    lead: str = ""  # white space that the template writes before `closes`
    tail: str = ""  # white space that the template writes after `closes`
    calls: tuple[str, ...] = ()  # marks of tool calls, which also end a thought and belong to the answer
    answers: tuple[str, ...] = ()  # marks that begin the answer and belong to it, so the answer's constraint reads them
    signs: tuple[str, ...] = ()  # a template with all of these has this format; empty: a template with `closes`

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that an answer may have."""
        return (self.opens, self.closes, *self.headers, *self.skipped)

    def closing(self, *, tail: bool = True) -> str:
        """Return the text that ends a thought and begins the answer. tail: append white space before the answer."""
        end = f"{self.lead}{self.closes}{self.tail if tail else ''}"
        return f"{end}{self.between}{self.headers[0]}" if self.headers else end

    def to_answer(self, prompt: str) -> str:
        """Return the text after this prompt that begins the answer without a thought."""
        state = self.begins(prompt)
        return self.closing() if state == "thought" else self.headers[0] if state == "start" and self.headers else ""

    def begins(self, prompt: str) -> State:
        """Return the state of an answer that follows this prompt."""
        end = prompt.rstrip()
        if any(end.endswith(mark) for mark in self.headers) or re.search(_at_end(self.closes), prompt):
            return "answer"
        return "thought" if re.search(_at_end(self.opens), prompt) else "start"


_MARKED = (
    ThinkingFormat("[THINK]", "[/THINK]"),  # Mistral
    ThinkingFormat("<|channel>thought", "<channel|>", again=True, signs=("<|channel>thought",)),  # Gemma 4
    ThinkingFormat(  # gpt-oss; the tool call parser handles calls in their own channel
        "<|channel|>analysis<|message|>", "<|end|>",
        headers=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        skipped=("<|start|>assistant", "<|end|>"), between="<|start|>assistant", again=True,
        signs=("<|channel|>analysis",),
    ),
    ThinkingFormat(  # Cohere
        "<|START_THINKING|>", "<|END_THINKING|>", headers=("<|START_RESPONSE|>",), skipped=("<|END_RESPONSE|>",)
    ),
    ThinkingFormat(  # Kimi K3
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", headers=("<|open|>response<|sep|>",),
        skipped=("<|close|>response<|sep|>",), signs=("<|open|>", "<|sep|>", "think"),
    ),
    ThinkingFormat("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi VL
    ThinkingFormat(  # Apriel
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", skipped=("[END FINAL RESPONSE]",), lead="\n"
    ),
)  # fmt: skip
_TAG = re.compile(r"</((?:\w+:)?think|thought)>")  # Qwen, DeepSeek, GLM, MiniMax, Nemotron, Seed (`seed:think`)


def thinking_format(template: str) -> ThinkingFormat | None:
    """Return the thinking format in a template's source, or None if the model is not known to think."""
    for form in _MARKED:
        if all(sign in template for sign in form.signs or (form.closes,)):
            return form
    tag = _TAG.search(template)
    if tag is None:
        return None
    # In the strings of its source, the template shows the white space around the mark for earlier thoughts.
    around = re.findall(rf"((?:\\n)*){re.escape(tag[0])}((?:\\n)*)", template)
    lead, tail = (max(len(pair[side]) for pair in around) // len(r"\n") for side in (0, 1))
    skipped = ("<answer>", "</answer>") if r"</answer>" in template else ()  # Hunyuan
    form = ThinkingFormat(f"<{tag[1]}>", tag[0], skipped=skipped)
    return replace(form, lead="\n" * min(lead, 1), tail="\n" * tail)


def parse_think(text: str) -> int:
    """Return a thinking budget from `off`, `auto` or a number of tokens. Raises ValueError for other text."""
    words = {"off": 0, "auto": AUTO}
    if text in words:
        return words[text]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"needs off, auto or a number of tokens, got {text!r:.40}")
    return int(text[:12])


def switches(think: int) -> dict[str, Any]:
    """Return template variables that turn thinking on or off, under all names that templates use.

    think: thinking budget, see `AUTO`. A template ignores the names that it does not use.
    """
    if think == AUTO:
        return {}
    return {"enable_thinking": think > 0, "thinking": think > 0, "thinking_budget": think}


def with_thoughts(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages with their `reasoning_content` under the names that a template reads.

    The template chooses the thoughts that stay in the prompt. Most templates drop thoughts before the last question.
    """
    return [_with_thought(message, template) for message in messages]


def _with_thought(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    values = dict(message)
    thought = values.pop("reasoning_content", None)
    if not thought:
        return values
    if "[THINK]" in template and re.search(r"['\"]thinking['\"]", template):
        parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": values.get("content") or ""}]
        return {**values, "content": parts}
    for name in ("reasoning_content", "reasoning", "thinking"):
        # gpt-oss accepts a text or a thought before a call, but not both.
        is_twice = name == "thinking" and values.get("tool_calls") and values.get("content")
        if re.search(rf"\b{name}\b", template) and not is_twice:
            values[name] = thought
    return values


def _at_end(mark: str) -> str:
    """Return a pattern of texts that end with a mark, optionally followed by a tag and white space."""
    return re.escape(mark) + r"\s*(?:<[\w:]+>\s*)?$"
