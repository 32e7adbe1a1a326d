"""Errors that a person can act on. Every message says what was needed, what was there, and what to do."""


class EdgeError(Exception):
    """Base class of this package's errors that a person can act on."""

    devices: tuple[str, ...] = ()  # addresses of the workers that could not do their part, where that is known


class EngineError(EdgeError):
    """llama.cpp or ONNX Runtime failed to load, to make a context or to compute; the message has its reason."""


class NotEnoughMemory(EdgeError):
    """The model does not fit at this context length; the message gives need and have of each part."""

    least: int | None = None  # bytes of the least budget that would do; None: not known


class WeightsError(EdgeError):
    """Weights cannot be read from their file while the model runs; the message names the file and the offset."""


class ContextFull(EdgeError):
    """The conversation is longer than the context."""


class EmptyPrompt(ContextFull):
    """A prompt has no token. Clients must not take it for one that is too long, which they would shorten."""


class TemplateError(EdgeError):
    """A chat template is not valid, or failed on these messages."""


class TemplateStopped(TemplateError):
    """A chat template exceeded a limit of time or memory."""


class PictureError(EdgeError, ValueError):
    """A picture or page cannot be made: matplotlib is missing, there is nothing to show, or the file name has another
    type."""


class MediaError(EdgeError):
    """A picture or sound cannot be used: it is damaged, too large, or the model takes none."""


class SamplingError(EdgeError):
    """A sampling option, grammar or JSON schema cannot be used."""


class HubError(EdgeError):
    """A model could not be fetched: no such repository or file, no network, or no room."""


class CatalogError(EdgeError):
    """A catalog of models cannot be used: the message names the entry, its key, what is needed and what is there."""


class Interrupted(EdgeError):
    """The computation was stopped on request before it was complete."""


class TextError(EdgeError):
    """A text for calibration or evaluation cannot be used: it is too short, not readable, or not UTF-8."""


class SizeTooSmall(EdgeError):
    """No file of the model can be as small as requested; the message gives the smallest size."""


class ChatFileError(EdgeError):
    """A file is no saved conversation."""


class PrefixError(EdgeError):
    """The prefix cache cannot be used: its key is damaged or open to others, or its folder cannot be read."""


class SliceError(EdgeError):
    """A slice cannot be cut, stored or used: it is missing, its model file changed, or another process writes it."""


class SliceBusy(SliceError):
    """Another process is writing the slice."""


class DigestMismatch(SliceError):
    """Bytes do not have the SHA-256 that was announced; the message says need and have."""


class NoRoom(SliceError):
    """A slice does not fit into the cache or on its disk; the message says need and have."""


class WorkerError(EdgeError):
    """A worker refused a request, or its engine process died; the message has the worker's reason."""

    def __init__(self, message: str, error: str = "") -> None:
        """error: the class of the error on the worker, for instance NotEnoughMemory; empty where a process died."""
        super().__init__(message)
        self.error = error


class Overloaded(EdgeError):
    """The queue of requests is full; the message says how many wait. Try again later."""


class NotAllowed(EdgeError):
    """Something that the server's options do not allow."""


class EngineGone(EdgeError):
    """The process that computes an answer ended before it was complete; the message says how."""


class PoisonousRequest(EngineGone):
    """A request ended the process that was to answer it, and the next one, too; the message says how."""


class UnknownModel(EdgeError):
    """A server has no model of this name; the message says which it has."""
