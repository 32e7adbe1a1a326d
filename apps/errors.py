"""Exit codes of errors."""

import errno

from devices.files import FULL

# Exit codes, as documented in docs/cli.md. Classes are listed by name: importing them would make --help slow.
_NAMES = {
    2: "BadRequest MediaError NotAllowed PictureError PlanError SamplingError ShapeError UnknownTypeError UsageError",
    3: "CannotSlice CatalogError ChatFileError ClusterFileError LabFileError ModelFileError NotThere OSError"
    " PrefixError RecipeError SliceError StateError TemplateError TextError TraceError TrustError UnknownModel"
    " WeightsError",
    4: "ContextFull DoesNotFit NoRoom NotEnoughMemory SizeTooSmall",
    5: "EngineError EngineGone",
    6: "HubError",
    7: "DiscoveryError LabError Overloaded TransportError WorkerError",
    130: "Interrupted",
}
EXIT_CODES = {name: code for code, names in _NAMES.items() for name in names.split()}
EXIT_BUG, EXIT_NO_ROOM, EXIT_INTERRUPTED = 1, 4, 130
# Remedies shown to users, by the error number of a file operation.
REMEDIES = {
    errno.ENOENT: "check its name",
    errno.EISDIR: "name a file in this folder",
    errno.ENOTDIR: "check its name: a part of the path is a file and not a folder",
    errno.EACCES: "give this user permission, or name another file",
    errno.EROFS: "name a file on a disk that can be written",
    **dict.fromkeys(FULL, "remove files there, or name another disk"),
}


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error. A full disk has the same code in every part of the program."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and all(cause is not known for known in causes):
        causes.append(cause)  # the loop ends at an error that is its own cause
    if any(isinstance(cause, OSError) and cause.errno in FULL for cause in causes):
        return EXIT_NO_ROOM
    return next((EXIT_CODES[c.__name__] for c in type(error).__mro__ if c.__name__ in EXIT_CODES), EXIT_BUG)


class UsageError(Exception):
    """Options that contradict each other, or are not allowed together."""
