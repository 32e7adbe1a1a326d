"""The part of PyTorch that guidellm loads its questions with; the package itself takes 5 GB."""

from types import SimpleNamespace

from . import utils as utils


class Tensor:
    """Values are compared with this type, and none has it."""


class Generator:
    """Numbers by chance: nothing here draws any."""

    def manual_seed(self, seed: int) -> "Generator":
        return self


nn = SimpleNamespace(Module=Tensor)
