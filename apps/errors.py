"""What a command can fail with, as exit codes."""

import errno

# Exit codes, as documented in docs/cli.md. Classes are named, not imported: importing them would make --help slow.
EXIT_CODES = {
    "PictureError": 2,
    "PlanError": 2,
    "SamplingError": 2,
    "ShapeError": 2,
    "UnknownTypeError": 2,
    "UsageError": 2,
    "CannotSlice": 3,
    "ModelFileError": 3,
    "TemplateError": 3,
    "TextError": 3,
    "ChatFileError": 3,
    "OSError": 3,
    "WeightsError": 3,
    "NotEnoughMemory": 4,
    "SizeTooSmall": 4,
    "DoesNotFit": 4,
    "ContextFull": 4,
    "EngineError": 5,
    "Interrupted": 130,
    "HubError": 6,
    "TrustError": 3,
    "DiscoveryError": 7,
    "LabError": 7,
    "LabFileError": 3,
    "ClusterFileError": 3,
    "TraceError": 3,
    "TransportError": 7,
    "WorkerError": 7,
    "EngineGone": 5,
    "Overloaded": 7,
    "UnknownModel": 3,
    "BadRequest": 2,
    "NotThere": 3,
    "NoRoom": 4,
    "SliceError": 3,
    "StateError": 3,
    "PrefixError": 3,
    "RecipeError": 3,
}


EXIT_BUG, EXIT_NO_ROOM = 1, 4
FULL = (errno.ENOSPC, errno.EDQUOT)


def exit_code(error: BaseException) -> int:
    """The exit code for an error. A full disk has one code, whichever part of the program met it."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and all(cause is not known for known in causes):
        causes.append(cause)  # what was raised from itself has itself for a cause
    if any(isinstance(cause, OSError) and cause.errno in FULL for cause in causes):
        return EXIT_NO_ROOM
    return next((EXIT_CODES[c.__name__] for c in type(error).__mro__ if c.__name__ in EXIT_CODES), EXIT_BUG)


class UsageError(Exception):
    """Options that do not go together."""
