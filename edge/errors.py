"""What can go wrong while a model runs. Every message says what was needed, what was there, and what to do."""


class EdgeError(Exception):
    """Base of what this package raises for things a person can act on."""

    devices: tuple[str, ...] = ()  # addresses of the workers that could not do their part, where that is known


class EngineError(EdgeError):
    """llama.cpp or ONNX Runtime refused: a load, a context or a batch failed; the message carries its own last word."""


class NotEnoughMemory(EdgeError):
    """The model does not fit at this context length; the message says need and have, part by part."""


class WeightsError(EdgeError):
    """Weights cannot be read from their file while the model runs; the message names the file and the offset."""


class ContextFull(EdgeError):
    """The conversation is longer than the context it was given."""


class TemplateError(EdgeError):
    """A chat template is not valid, or failed on these messages."""


class PictureError(EdgeError, ValueError):
    """A picture or page that cannot be made: without matplotlib, of nothing, or under a name of another kind."""


class SamplingError(EdgeError):
    """A sampling option, grammar or JSON schema that cannot be used."""


class HubError(EdgeError):
    """A model could not be fetched: no such repository or file, no network, or no room."""


class Interrupted(EdgeError):
    """The computation was stopped on request before it was complete."""


class TextError(EdgeError):
    """A text to calibrate or evaluate with that cannot be used: too short, not readable, or not UTF-8."""


class SizeTooSmall(EdgeError):
    """No file of a model can be as small as was asked; the message says what the smallest is."""


class ChatFileError(EdgeError):
    """A file that should hold a saved conversation does not."""


class PrefixError(EdgeError):
    """Kept prompts cannot be used: their key is damaged or open to others, or their folder cannot be read."""


class SliceError(EdgeError):
    """A slice cannot be cut, stored or used: its model file has changed, it is not there, or someone else writes it."""


class SliceBusy(SliceError):
    """Somebody else writes the slice just now."""


class DigestMismatch(SliceError):
    """Bytes that do not have the SHA-256 they were announced with; the message says need and have."""


class NoRoom(SliceError):
    """A slice does not fit into the cache or on its disk; the message says need and have."""


class WorkerError(EdgeError):
    """A worker could not do what it was asked, or its engine process died; the message has its words."""

    def __init__(self, message: str, error: str = "") -> None:
        """error: the class of the error on the worker, for instance NotEnoughMemory; empty where a process died."""
        super().__init__(message)
        self.error = error


class Overloaded(EdgeError):
    """More requests wait than may; the message says how many. Ask again later."""


class EngineGone(EdgeError):
    """The process that computes an answer ended before it was complete; the message says how."""


class UnknownModel(EdgeError):
    """A server has no model of this name; the message says which it has."""
