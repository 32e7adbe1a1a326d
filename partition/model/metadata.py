"""Numbers of a model from GGUF metadata, with a clear error if a number is missing or absurd."""

from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray

MAX_COUNT = 2**31 - 1  # llama.cpp stores most of these numbers in an int


class Metadata:
    """Metadata with the architecture's prefix: `count("block_count")` reads `llama.block_count`."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.architecture
        if not self.architecture:
            raise self.error("general.architecture is missing or not a string; this file is not a language model")
        if len(self.architecture) > 64 or not self.architecture.isprintable():
            raise self.error(
                f"general.architecture is {self.architecture[:64]!r}, which is not a name; the file is damaged"
            )

    def error(self, problem: str) -> ModelFileError:
        """Return an error about this file."""
        return ModelFileError(f"{self.file.path.name}: {problem}")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def count(self, name: str, default: int | None = None, least: int = 0, most: int = MAX_COUNT) -> int:
        """Return a whole number in [least, most].

        If the key is missing, return `default`, or raise ModelFileError if `default` is None.
        """
        value = self.file.metadata.get(self.key(name), default)
        if value is None:
            raise self.error(f"{self.key(name)} is missing; convert the model again")
        return self._checked(name, value, least, most)

    def per_layer(self, name: str, n_layers: int, default: int | tuple[int, ...]) -> tuple[int, ...]:
        """Return one number for each layer, from an array or a single number."""
        value = self.file.metadata.get(self.key(name), default)
        if not isinstance(value, GgufArray | tuple):
            return (self._checked(name, value, 0, MAX_COUNT),) * n_layers
        if len(value) != n_layers:
            raise self.error(f"{self.key(name)} has {len(value)} items, the model has {n_layers} layers")
        return tuple(self._checked(name, item, 0, MAX_COUNT) for item in value)

    def _checked(self, name: str, value: object, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            shown = repr(value)[:80]
            raise self.error(f"{self.key(name)} is {shown}, expected a whole number from {least} to {most}")
        return value
