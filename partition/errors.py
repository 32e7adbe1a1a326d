"""Errors of cutting a model: in the plan, the model, or the state of a sequence."""

from edge.errors import EdgeError


class PlanError(EdgeError, ValueError):
    """A plan is impossible or invalid: its ranges have a gap, it has more ranks than heads, a field is unknown. The
    message gives need, have and a remedy in one line."""


class CannotSlice(EdgeError, ValueError):
    """This model cannot be cut that way. The message gives the reason and the alternative, in one line."""


class StateError(EdgeError, ValueError):
    """Keys and values do not belong to this model's slice and these positions, or are damaged. They can be
    computed again from the tokens."""
