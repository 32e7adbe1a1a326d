"""Thoughts of one answer: separated from its text, limited by a budget, and exempt from the answer's constraint."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edge.llama.llama import Model
from edge.text.thinking_format import AUTO, State, ThinkingFormat
from edge.text.thinking_splitter import Split, ThoughtSplitter


@dataclass(frozen=True)
class Thinking:
    """Thinking format and budget of an answer."""

    form: ThinkingFormat
    state: State = "start"  # state at the end of the prompt
    budget: int | None = None  # tokens of thoughts including their marks; None: unlimited

    @classmethod
    def from_prompt(cls, prompt: str, form: ThinkingFormat | None, think: int = AUTO) -> Thinking | None:
        """Return the thinking settings of an answer to a prompt, or None if the model is not known to think.

        think: thinking budget, see `AUTO`.
        """
        return None if form is None else cls(form, form.begins(prompt), None if think == AUTO else think)


class ThoughtTracker:
    """Follows the thoughts of one answer token by token, and determines forced tokens.

    At the end of the budget, the thought is closed with the model's own end mark. Its tokens are forced one by one,
    early enough to stay within the budget.
    """

    def __init__(self, model: Model, thinking: Thinking, *, constrained: bool) -> None:
        """constrained: the answer follows a grammar, which does not apply to its thoughts."""
        form = thinking.form
        self._model, self._constrained = model, constrained
        self._splitter = ThoughtSplitter(form, thinking.state)
        self._budget = thinking.budget
        self.tokens = 0  # tokens of thoughts, including their marks
        self._unknown = 0  # tokens before it is certain whether a thought opens
        self._forced: deque[int] = deque()
        # With a constraint, white space after a thought belongs to the constrained text, even in a resumed answer.
        self._closing = self._ids(form.closing(tail=not constrained))
        self._begun: list[int] = []  # first tokens of a mark before the answer
        opens = () if thinking.budget == 0 else (form.opens,)
        self._answers = [self._ids(mark) for mark in form.answers]
        self._marks = [self._ids(mark) for mark in (*opens, *form.headers, *form.skipped)] + self._answers
        # Tokens of the answer that were first taken for a mark. The constraint must still read them.
        self.unread: list[int] = []
        if thinking.budget == 0 and thinking.state == "start" and form.headers:
            self._forced.extend(self._ids(form.headers[0]))

    @property
    def state(self) -> State:
        """State of the answer."""
        return self._splitter.state

    def _ids(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False, parse_special=True)

    def forced(self, *, is_whole: bool = True) -> int | None:
        """Return the token that must come next, or None if any token may. is_whole: no character is incomplete."""
        is_bounded = self._budget is not None and self.state == "thought" and is_whole
        if is_bounded and not self._forced and self.tokens + len(self._closing) >= (self._budget or 0):
            self._forced.extend(self._closing)
        return self._forced[0] if self._forced else None

    def instead_of_end(self) -> int | None:
        """Return the token that replaces an end token, or None if the answer may end.

        A thought with a budget, or before a constrained answer, is closed by force so that an answer follows.
        """
        if self.state != "thought" or (self._budget is None and not self._constrained):
            return None
        self._forced.extend(self._closing)
        return self._forced[0]

    def mark(self, token: int) -> int | None:
        """Return the next token of a mark before an answer, or None if there is no mark.

        token: drawn without the answer's constraint. A mark that has begun is completed regardless of the token.
        """
        marks = [mark[len(self._begun) :] for mark in self._marks if mark[: len(self._begun)] == self._begun]
        following = [mark[0] for mark in marks if mark]
        if token in following:
            return token
        return following[0] if self._begun and following else None

    def add(self, token: int, text: str) -> Split:
        """Add a token with the text that it makes certain."""
        before, is_forced = self.state, bool(self._forced)
        if is_forced:
            self._forced.popleft()
        begun = [*self._begun, token]
        if before == "start" and self._constrained:
            self._begin_mark(token)
        split = self._splitter.add(text)
        has_begun = before == "start" and self.state == "answer" and self._constrained
        self.unread = begun if has_begun and any(mark[: len(begun)] == begun for mark in self._answers) else []
        self._unknown += 1
        if before == "thought" or self.state == "thought" or (is_forced and self.tokens):
            self.tokens += self._unknown
            self._unknown = 0
        elif self.state == "answer":
            self._unknown = 0
        return split

    def _begin_mark(self, token: int) -> None:
        begun = [*self._begun, token]
        is_begun = any(mark[: len(begun)] == begun for mark in self._marks)
        self._begun = begun if is_begun and begun not in self._marks else []

    def is_answer(self, token: int) -> bool:
        """Return True if the next token belongs to the answer itself, to which the constraint applies."""
        return self.state == "answer" or (self.state == "start" and self.mark(token) != token)

    def add_rest(self, text: str) -> Split:
        """Add the final text, which has no token of its own. Return all text that was held back."""
        before, rest = self._splitter.add(text), self._splitter.end()
        return Split(before.thought + rest.thought, before.text + rest.text)
