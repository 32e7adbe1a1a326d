"""Model names as clients write them, matched to the served names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from edge.api.config import EngineConfig
from edge.errors import UnknownModel
from edge.serve.adapters import ServedAdapters

_MOST_NAMED = 20  # models listed in an error message
_MOST_CHARACTERS = 500  # characters of a name that are examined
_HUB = re.compile(r"(https?:/+)?(www\.)?(hf\.co|huggingface\.co)/+|hf:/+|ollama:/+", re.IGNORECASE)
_ENDINGS = (":latest", ".gguf")  # endings without information


class ServedNames:
    """Names of the models of a server, and of their adapters."""

    def __init__(self, configs: Mapping[str, EngineConfig], *, any_name: bool) -> None:
        """configs: configurations by name, the default model first. Models may be added later.
        any_name: any name in a request stands for the only model.

        Raises EngineError for adapters with invalid names.
        """
        self._configs, self._any_name = configs, any_name
        names = list(configs)
        self.adapters = {
            name: ServedAdapters(lora, names) if (lora := config.options.lora) else ServedAdapters()
            for name, config in configs.items()
        }

    def resolve(self, name: str | None) -> str:
        """Return the model or adapter that a name stands for, see `ServedModels.resolve`. Raises UnknownModel."""
        if not self._configs:
            raise UnknownModel("this server has no language model; its networks are listed by /v2/repository/index")
        first = next(iter(self._configs))
        if name is None or is_empty(name):
            return first
        every = [*self._configs, *(own for adapters in self.adapters.values() for own in adapters.names)]
        matches = matching(name, every)
        if len(matches) == 1:
            return matches[0]
        if not matches and len(every) == 1 and self._any_name:
            return first
        named = ", ".join((matches or every)[:_MOST_NAMED])
        if matches:
            raise UnknownModel(f"the name {name[:200]!r} may stand for several models; write one of {named}")
        raise UnknownModel(f"there is no model {name[:200]!r} here; there are {named}")

    def model(self, name: str | None) -> str:
        """Return the model that a name in a request stands for. name: a model or an adapter. Raises UnknownModel."""
        served = self.resolve(name)
        return next((model for model, adapters in self.adapters.items() if served in adapters.names), served)


def is_empty(name: str) -> bool:
    """Return True if a name is empty apart from ignored parts, so that the default model is meant."""
    return not _plain(name)


def matching(request_name: str, names: Collection[str]) -> list[str]:
    """Return the served names that match a client's name, or several if the name is ambiguous.

    An exact match has priority. Otherwise, these parts are ignored: spaces around the name, the endings `.gguf` and
    `:latest`, the address of the hub, and folders or providers before the name. The last attempt also ignores case.
    """
    if request_name in names:
        return [request_name]
    if len(request_name) > _MOST_CHARACTERS:
        return []
    keys = {name: {_plain(name), *_parts_of_hub_name(name)} for name in names}
    for tail in _tails(request_name):
        for fold in (str, str.casefold):
            matches = [name for name in names if fold(tail) in map(fold, keys[name])]
            if matches:
                return matches
    return []


def _plain(name: str) -> str:
    plain = _HUB.sub("", name[: 2 * _MOST_CHARACTERS].strip(), count=1).strip("/\\ ")
    while ending := next((end for end in _ENDINGS if plain.lower().endswith(end)), None):
        plain = plain[: -len(ending)].rstrip()
    return plain


def _parts_of_hub_name(name: str) -> list[str]:
    """Return the repository and the file of a served name OWNER/NAME:FILE. Each may be used alone."""
    repository, colon, file = name.partition(":")
    return [repository, _plain(file)] if colon and "/" in repository and file.lower().endswith(".gguf") else []


def _tails(request_name: str) -> Iterator[str]:
    """Yield the name, and then the name without its leading folders or providers, longest first."""
    parts = re.split(r"[/\\]+", _plain(request_name))
    for first in range(len(parts)):
        if tail := "/".join(parts[first:]):
            yield tail
    if request_name.strip().lower().endswith(".gguf") and ":" in parts[-1]:
        yield parts[-1].rpartition(":")[2]
