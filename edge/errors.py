"""Errors that the user can act on. Each message states the requirement, the value found and the remedy."""


class EdgeError(Exception):
    """Base class of this package's errors that the user can act on."""

    devices: tuple[str, ...] = ()  # addresses of the workers that caused the error, if known
    # Returns a message in the words of the program's user. `import edge` sets it.
    worded = staticmethod(lambda message: str(message))

    def __str__(self) -> str:
        """Return the message. It names options of the commands, or parameters in a program that imports edge."""
        return EdgeError.worded(super().__str__())


class EngineError(EdgeError):
    """llama.cpp or ONNX Runtime failed to load, to create a context or to compute. The message has its reason."""


class NotEnoughMemory(EdgeError):
    """The model does not fit at this context length. The message lists needed and available bytes of each part."""

    least: int | None = None  # smallest budget that would suffice, in bytes; None if unknown


class WeightsError(EdgeError):
    """Weights cannot be read from their file while the model runs. The message names the file and the offset."""


class ContextFull(EdgeError):
    """The conversation is longer than the context."""


class EmptyPrompt(ContextFull):
    """The prompt has no tokens. It is distinct from a prompt that is too long, which clients shorten and retry."""


class TemplateError(EdgeError):
    """The chat template is invalid, or it failed to render these messages."""


class TemplateStopped(TemplateError):
    """A chat template exceeded a limit of time or memory."""


class PictureError(EdgeError, ValueError):
    """A picture or page cannot be made.

    Causes: matplotlib is missing, there is nothing to show, or the file name's extension is not supported.
    """


class MediaError(EdgeError):
    """A picture or sound cannot be used: it is damaged or too large, or the model does not support it."""


class SamplingError(EdgeError):
    """A sampling option, grammar or JSON schema cannot be used."""


class ConstraintUnavailable(SamplingError):
    """The machine is too busy to follow a grammar or JSON schema. The same request may succeed later."""


class HubError(EdgeError):
    """A model could not be fetched: the repository or file does not exist, the network failed, or the disk is full."""


class CatalogError(EdgeError):
    """A model catalog cannot be used. The message names the entry and key, the expected value and the value found."""


class Interrupted(EdgeError):
    """The computation was stopped on request before it was complete."""


class TextError(EdgeError):
    """A calibration or evaluation text cannot be used: it is too short, unreadable, or not UTF-8."""


class SizeTooSmall(EdgeError):
    """No file of the model can be as small as requested. The message gives the smallest possible size."""


class ChatFileError(EdgeError):
    """The file is not a saved conversation."""


class PrefixError(EdgeError):
    """The prefix cache cannot be used: its key is damaged or readable by other users, or its folder is unreadable."""


class SliceError(EdgeError):
    """A slice cannot be cut, stored or used.

    Causes: the slice is missing, its model file changed, or another process is writing it.
    """


class SliceBusy(SliceError):
    """Another process is writing the slice."""


class DigestMismatch(SliceError):
    """Bytes do not have the announced SHA-256. The message gives the expected and the actual digest."""


class NoRoom(SliceError):
    """A slice does not fit into the cache or on its disk. The message gives needed and free bytes."""


class WorkerError(EdgeError):
    """A worker refused a request, or its engine process died. The message has the worker's reason."""

    def __init__(self, message: str, error: str = "") -> None:
        """error: class name of the error on the worker, such as "NotEnoughMemory"; empty if its process died."""
        super().__init__(message)
        self.error = error


class Overloaded(EdgeError):
    """The request queue is full. The message gives the number of waiting requests; try again later."""


class NotAllowed(EdgeError):
    """The server's options do not allow the request."""


class EngineGone(EdgeError):
    """The process that computes an answer ended before the answer was complete. The message gives the cause."""


class ReplicaLost(EngineGone):
    """A replica lost a device. Other replicas continue its requests."""


class PoisonousRequest(EngineGone):
    """A request crashed the engine process, and crashed the next one as well. The message gives the cause."""


class UnknownModel(EdgeError):
    """The server has no model of this name. The message lists the names that it has."""
