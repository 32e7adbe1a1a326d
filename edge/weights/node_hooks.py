"""Node hooks that bring weights to their places before a node reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from edge.llama.products import Products
from edge.weights.experts import Experts
from edge.weights.plan import PagePlan
from edge.weights.roles import Roles
from edge.weights.window import Pager, Piece

_CHOSEN = re.compile(r"ffn_moe_topk-(\d+)")  # nodes with the expert numbers of each row


class PagingHooks:
    """Hooks for a paging plan. Call `restore` after every pass, before the graphs are freed."""

    def __init__(
        self,
        roles: Roles,
        plan: PagePlan,
        places: Mapping[Piece, int],
        pager: Pager | None,
        experts: Experts | None,
        products: Products | None,
    ) -> None:
        """places: addresses of resident weights. products: needed if the head is cut."""
        self._roles, self._plan, self._places = roles, plan, places
        self._pager, self._experts, self._products = pager, experts, products
        self._streamed = {p.weight.address: p for p in plan.streamed if p not in plan.head_pieces}
        # Weights that may be used in only one way; experts are in `_banks`.
        self._factors = self._streamed.keys() | {p.weight.address for p in roles.factors if p.repacked}
        # By weight with experts: its layer, and its number within the layer.
        self._banks: dict[int, tuple[int, int]] = {}
        if experts is not None:
            self._banks = {p.weight.address: (n, i) for n, ps in roles.experts.items() for i, p in enumerate(ps)}
        # By layer, slots of the chosen experts: numbers, and ggml's struct for them.
        self._slots: dict[int, tuple[NDArray[np.int32], Any]] = {}
        head = roles.head
        # A head tied to the token table gets its own struct if it lies at another place than the table's rows.
        self._own_head = None
        if head is not None and roles.tied and roles.table is not None and head.repacked and head in places:
            self._own_head = head.weight.part(places[head], head.rows, repacked=True)
        self._restores: list[Callable[[], None]] = []  # restore functions of changed nodes, in their order
        self._choosing: set[int] = set()  # layers with an expert choice in the graph that is being learned

    def restore(self) -> None:
        """Undo the changes of a pass to its graph."""
        for restore in self._restores:
            restore()
        self._restores.clear()
        self._choosing.clear()

    def hooks(self) -> list[Hook]:
        """Return the hooks, or none if every weight is where llama.cpp reads it."""
        hooks = []
        if self._streamed:
            pager = self._pager
            assert pager is not None
            acquire = partial(self._acquire, pager)
            hooks.append(Hook(self._uses_streamed, lambda _: pager.release(), acquire, pager.ready))
        if (experts := self._experts) is not None:
            hooks.append(Hook(self._chooses, partial(self._choose, experts)))
            for i in range(max(map(len, self._roles.experts.values()))):
                uses, before = partial(self._uses_bank, i), partial(self._await_bank, experts, i)
                hooks.append(Hook(uses, None, before, partial(experts.arrived, i)))
        if self._plan.head_pieces:
            hooks.append(Hook(self._is_head, self._multiply_head, self._skip_head))
        elif self._own_head is not None:
            hooks.append(Hook(self._is_head, lambda _: self.restore(), self._use_own_head))
        return [Hook(self._check, lambda _: None), *hooks] if hooks else []

    def _check(self, node: Node) -> bool:
        """Raise EngineError for a node that uses a factor in an unsupported way. Called once for every node."""
        factors, banks = self._factors, self._banks
        first, *others = node.sources
        wrong = [address for address in (*others, *node.viewed) if address in factors or address in banks]
        if first in factors and node.op != "MUL_MAT":
            wrong.append(first)
        if first in banks and (node.op != "MUL_MAT_ID" or banks[first][0] not in self._choosing):
            wrong.append(first)
        if wrong:
            weights = (*self._roles.factors, *(p for pieces in self._roles.experts.values() for p in pieces))
            name = next(piece.weight.name for piece in weights if piece.weight.address in wrong)
            raise EngineError(f"this model uses {name} in a way that cannot be paged; leave --memory out")
        return False

    # --- streamed weights ---

    def _uses_streamed(self, node: Node) -> bool:
        return node.source in self._streamed

    def _acquire(self, pager: Pager, node: Node) -> None:
        piece = self._streamed[node.source]
        piece.weight.point(pager.acquire(piece), piece.repacked)

    # --- experts ---

    def _chooses(self, node: Node) -> bool:
        match = _CHOSEN.fullmatch(node.name)
        if match is None or int(match[1]) not in self._roles.experts:  # the experts of other layers are on the GPU
            return False
        self._choosing.add(int(match[1]))
        return True

    def _choose(self, experts: Experts, node: Node) -> None:
        layer, numbers = _layer(node), node.integers().tolist()
        slots = experts.choose(layer, dict.fromkeys(number for row in numbers for number in row))
        values = np.array([[slots[number] for number in row] for row in numbers], np.int32)
        self._slots[layer] = values, node.with_integers(values)

    def _uses_bank(self, bank: int, node: Node) -> bool:
        return node.source in self._banks and self._banks[node.source][1] == bank

    def _await_bank(self, experts: Experts, bank: int, node: Node) -> None:
        self._restores.append(node.use_source(self._slots[self._banks[node.source][0]][1], 2))
        experts.wait(bank)

    # --- the head ---

    def _is_head(self, node: Node) -> bool:
        head = self._roles.head
        return head is not None and node.source == head.weight.address and node.op == "MUL_MAT"

    def _use_own_head(self, node: Node) -> None:
        assert self._own_head is not None
        self._restores.append(node.use_source(self._own_head))

    def _skip_head(self, node: Node) -> None:
        self._restores.append(node.skip())

    def _multiply_head(self, node: Node) -> None:
        """Compute the head's product piece by piece. The graph skips this node."""
        assert self._products is not None
        self._restores.pop()()
        n, columns = node.shape
        if n == 0:
            return
        x, out = node.product_addresses()
        first = 0
        for piece in self._plan.head_pieces:
            address = self._places.get(piece)
            pager = self._pager if address is None else None
            if pager is not None:
                address = pager.acquire(piece)
            assert address is not None
            self._products.multiply(
                piece.weight, address, piece.rows, piece.repacked, x, n, out + 4 * first, 4 * columns
            )
            if pager is not None:
                pager.release()
            first += piece.rows


def _layer(node: Node) -> int:
    """Return the layer number at the end of the node's name."""
    return int(node.name.rpartition("-")[2])
