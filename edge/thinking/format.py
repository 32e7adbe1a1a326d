"""Thinking formats: how a model marks its thoughts, read from the source of its chat template.

A thought stands between two marks, most often `<think>` and `</think>`. A template may open it at the end of the
prompt, leave that to the model, or close it at once, where thinking is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["start", "thought", "answer"]
"""State of an answer. start: nothing of the answer has come, and a thought may open. thought: in one. answer: the
answer itself has begun."""

AUTO = -1  # thinking as the template has it, without a bound; 0: off; above: tokens that a thought may have


@dataclass(frozen=True)
class ThinkingFormat:
    """Marks around thoughts and answers. None of them is part of either."""

    opens: str  # begins a thought
    closes: str  # ends it
    headers: tuple[str, ...] = ()  # begin the answer; the first of them that of a plain one
    skipped: tuple[str, ...] = ()  # other marks around answers
    between: str = ""  # comes between a thought and the header of its answer
    again: bool = False  # a thought may follow some of the answer
    lead: str = ""  # white space that the template writes before `closes`
    tail: str = ""  # and behind it
    calls: tuple[str, ...] = ()  # marks of calls, which end a thought, too, and are part of the answer
    answers: tuple[str, ...] = ()  # begin an answer as headers do, and are a part of it, which its constraint reads
    signs: tuple[str, ...] = ()  # a template with all of these has this format; none: one with `closes`

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that an answer may have."""
        return (self.opens, self.closes, *self.headers, *self.skipped)

    def closing(self, *, tail: bool = True) -> str:
        """Return the text that ends a thought, so that an answer begins. tail: with white space before the answer."""
        end = f"{self.lead}{self.closes}{self.tail if tail else ''}"
        return f"{end}{self.between}{self.headers[0]}" if self.headers else end

    def to_answer(self, prompt: str) -> str:
        """Return the text behind this prompt that begins its answer, without a thought."""
        state = self.begins(prompt)
        return self.closing() if state == "thought" else self.headers[0] if state == "start" and self.headers else ""

    def begins(self, prompt: str) -> State:
        """Return where an answer is that follows this prompt."""
        end = prompt.rstrip()
        if any(end.endswith(mark) for mark in self.headers) or re.search(_at_end(self.closes), prompt):
            return "answer"
        return "thought" if re.search(_at_end(self.opens), prompt) else "start"


_MARKED = (
    ThinkingFormat("[THINK]", "[/THINK]"),  # Mistral
    ThinkingFormat("<|channel>thought", "<channel|>", again=True, signs=("<|channel>thought",)),  # Gemma 4
    ThinkingFormat(  # gpt-oss; calls of functions are in a channel of their own, which is left to their parser
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
    """Return the format that a template's source uses; None if its model is not known to think."""
    for form in _MARKED:
        if all(sign in template for sign in form.signs or (form.closes,)):
            return form
    tag = _TAG.search(template)
    if tag is None:
        return None
    # White space around the mark as the template writes earlier thoughts, in the strings of its source.
    around = re.findall(rf"((?:\\n)*){re.escape(tag[0])}((?:\\n)*)", template)
    lead, tail = (max(len(pair[side]) for pair in around) // len(r"\n") for side in (0, 1))
    skipped = ("<answer>", "</answer>") if r"</answer>" in template else ()  # Hunyuan
    form = ThinkingFormat(f"<{tag[1]}>", tag[0], skipped=skipped)
    return replace(form, lead="\n" * min(lead, 1), tail="\n" * tail)


def parse_think(text: str) -> int:
    """Return tokens of thoughts for `off`, `auto` or a number. ValueError for anything else."""
    words = {"off": 0, "auto": AUTO}
    if text in words:
        return words[text]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r:.40} is none of off, auto, and a number of tokens")
    return int(text[:12])


def switches(think: int) -> dict[str, Any]:
    """Return variables that turn thinking off or on, by the names that templates have for them. A template reads its
    own of them. think: as `AUTO` says."""
    if think == AUTO:
        return {}
    return {"enable_thinking": think > 0, "thinking": think > 0, "thinking_budget": think}


def with_thoughts(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages with their `reasoning_content` under the names that a template reads. Which of them stay in the
    prompt is the template's choice: most leave out those before the last question."""
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
        # gpt-oss takes a text or a thought before a call, and refuses both.
        is_twice = name == "thinking" and values.get("tool_calls") and values.get("content")
        if re.search(rf"\b{name}\b", template) and not is_twice:
            values[name] = thought
    return values


def _at_end(mark: str) -> str:
    """Return a pattern of texts that end with a mark, and perhaps one tag and white space behind it."""
    return re.escape(mark) + r"\s*(?:<[\w:]+>\s*)?$"
