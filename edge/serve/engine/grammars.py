"""Control tokens in grammars of calls: a mark that is a token must come as that token, not as text."""

from __future__ import annotations

import json
import re

from edge.llama.llama import Model

# The rules that edge/serve/tools writes for marks: literals, and any text up to a mark.
_RULE = re.compile(r'^(lit|free|raw)(_\d+)(\[lazy\])?: (/\S*/ )?("(?:[^"\\]|\\.)*")$', re.MULTILINE)


def with_control_tokens(lark: str, model: Model) -> str:
    """Return a grammar of calls with the control tokens of a model in place of their names."""
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
    # Text cannot have the token, so it ends there by itself; what stands before the token may end it too early.
    rest = " ".join(parts[1:] if before else parts)
    if not before or kind == "free":
        return f"{kind}{number}: {anything}{rest}"
    return f"{kind}{number}: head{number} {rest}\nhead{number}[lazy]: {anything}{_quoted(before)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
