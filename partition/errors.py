"""Errors of cutting a model: in the plan, the model, or the state of a sequence."""

from edge.errors import EdgeError


class PlanError(EdgeError, ValueError):
    """A plan that cannot be: ranges that leave a gap, more ranks than there are heads to give out, a field that is not
    one. The message says what was needed, what was there and what to do, in one line."""


class CannotSlice(EdgeError, ValueError):
    """This model cannot be cut that way. The message gives the reason and the alternative, in one line."""


class StateError(EdgeError, ValueError):
    """Keys and values do not belong to this model's slice and these positions, or are damaged. They can be
    computed again from the tokens."""
