"""Errors about cutting a model: in the plan, in the model, or in the state of a sequence."""

from edge.errors import EdgeError


class PlanError(EdgeError, ValueError):
    """A plan is impossible or invalid: its ranges have a gap, it has more ranks than heads, or a field is unknown.

    The message gives need, have and a remedy in one line.
    """


class CannotSlice(EdgeError, ValueError):
    """This model cannot be cut in this way. The message gives the reason and an alternative in one line."""


class StateError(EdgeError, ValueError):
    """A KV cache does not fit the slice and the positions, or is damaged. It can be computed again from the tokens."""
