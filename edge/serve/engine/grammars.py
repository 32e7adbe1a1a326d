"""Control tokens in grammars of tool calls. A mark that is a control token must be generated as that token."""

from __future__ import annotations

import json
import re

from edge.llama.llama import Model

# Rules that edge/serve/tools writes for marks: literals, and free text up to a mark.
_RULE = re.compile(r'^(lit|free|raw)(_\d+)(\[lazy\])?: (/\S*/ )?("(?:[^"\\]|\\.)*")$', re.MULTILINE)


def with_control_tokens(lark: str, model: Model) -> str:
    """Return a grammar of tool calls with names of control tokens replaced by the model's tokens."""
    return _RULE.sub(lambda rule: _rewritten(rule, model), lark)


def _rewritten(rule: re.Match[str], model: Model) -> str:
    kind, number, _, anything, literal = rule.groups()
    text = json.loads(literal)
    parts: list[str] = []
    before = ""
    for token in model.tokenize(text, add_special=False, parse_special=True):
        name = model.piece(token, special=True).decode(errors="replace")
        if name and not model.piece(token) and name in text:
            plain, _, text = text.partition(name)
            before = before if parts else plain
            parts += [*([_quoted(plain)] if plain else []), f"<[{token}]>"]
    if not parts:
        return rule[0]
    parts += [_quoted(text)] if text else []
    if not anything:
        return f"{kind}{number}: {' '.join(parts)}"
    # Text cannot contain the control token, so free text ends there. Text before the token in the mark may end it
    # early.
    rest = " ".join(parts[1:] if before else parts)
    if not before or kind == "free":
        return f"{kind}{number}: {anything}{rest}"
    return f"{kind}{number}: head{number} {rest}\nhead{number}[lazy]: {anything}{_quoted(before)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
