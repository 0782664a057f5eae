"""The graph of one forward of a stage on torch, and its backward in one piece or in two.

Gradients of weights can wait, those of inputs hold up other stages. The first part goes from the roots to the inputs and
notes the gradients that arrive at nodes where a path to weights branches off; the second starts from these notes, so that no
node is computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["TorchChunk"]

Entry = tuple[Any, int]
"""Where gradients enter a part of the graph that only weights hang on: a node, and which of its inputs."""


class TorchChunk:
    """See `hp_pipeline.platform.protocol.Chunk`."""

    def __init__(self, inputs: Sequence[torch.Tensor], roots: Sequence[torch.Tensor]) -> None:
        self.inputs, self.roots = list(inputs), list(roots)
        self._starts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._branches: list[_Branch] = []
        self._late: list[torch.Tensor] = []
        self._split = False

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The whole backward."""
        starts = self._take(gradients)
        if starts:
            torch.autograd.backward([root for root, _ in starts], [gradient for _, gradient in starts])
        return self._taken()

    def backward_inputs(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """From the roots to the inputs."""
        starts = self._starts = self._take(gradients)
        if not self.inputs or not starts:
            return [None] * len(self.inputs)
        self._branches, self._late = _branches([root for root, _ in starts], self.inputs)
        handles = [branch.node.register_prehook(branch.note) for branch in self._branches if branch.node is not None]
        try:
            found = torch.autograd.grad(
                [root for root, _ in starts],
                self.inputs,
                [gradient for _, gradient in starts],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        self.inputs, self._split = [], True
        return [None if gradient is None else gradient.detach() for gradient in found]

    def backward_weights(self) -> None:
        """From the branches to the weights."""
        starts, self._starts = self._starts, []
        branches, self._branches = self._branches, []
        if not starts:
            return
        roots, gradients = [root for root, _ in starts], [gradient for _, gradient in starts]
        if not self._split:
            torch.autograd.backward(roots, gradients)
            return
        if self._late:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=self._late)
            self._late = []
        # One after the other, so that no more than the gradients of one branch wait to be added to the weights'.
        while branches:
            branches.pop().backward(starts)

    def release_inputs(self) -> None:
        """Let go of the inputs' memory; their gradients are made without it."""
        for leaf in self.inputs:
            leaf.data = leaf.new_empty(()).expand(leaf.shape)

    def _take(self, gradients: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Roots with the gradients to start from; a scalar root needs none. The chunk lets go of them."""
        roots, self.roots = self.roots, []
        return [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if root.requires_grad and (gradient is not None or root.dim() == 0)
        ]

    def _taken(self) -> list[torch.Tensor | None]:
        inputs, self.inputs = self.inputs, []
        return [leaf.grad for leaf in inputs]


class _Branch:
    """A node on the way to the inputs where ways to weights branch off.

    Attributes:
        node: it; None for a root on which only weights hang.
        entries: where those ways begin.
        root: number of such a root.
        weights: what they lead to, if nothing else does; a layer that is used twice has two branches for one weight.
    """

    def __init__(self, node: Any, entries: list[Entry], root: int = -1) -> None:
        self.node, self.entries, self.root = node, entries, root
        self.weights: list[torch.Tensor] = []
        self.arrived: Sequence[torch.Tensor | None] = ()

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called with the gradients that arrive at the node."""
        self.arrived = gradients

    def backward(self, starts: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """From the node to the weights, with what arrived there."""
        if self.node is None:
            root, given = starts[self.root]
            gradients: list[torch.Tensor | None] = [torch.ones_like(root) if given is None else given]
        else:
            arrived = [(number, one) for number, one in enumerate(self.arrived) if one is not None]
            edges, ones = [GradientEdge(self.node, number) for number, _ in arrived], [one for _, one in arrived]
            if not arrived:
                return
            if self.weights:
                torch.autograd.backward(edges, ones, inputs=self.weights)
                return
            # No further than the entries: through the node, other ways lead to the same weights.
            to = [GradientEdge(*entry) for entry in self.entries]
            gradients = list(torch.autograd.grad(edges, to, ones, retain_graph=True, allow_unused=True))
        pairs = [
            (GradientEdge(*entry), one) for entry, one in zip(self.entries, gradients, strict=True) if one is not None
        ]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [one for _, one in pairs])


def _branches(
    roots: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor]
) -> tuple[list[_Branch], list[torch.Tensor]]:
    """The branches of a graph, and the weights that can't be reached from branches without counting a way twice.

    The latter are those to which an entry leads that several nodes lead into, such as a weight that is used in several
    places: from the upper place, the lower one would be reached as well.
    """
    targets = {get_gradient_edge(leaf).node for leaf in inputs}
    first = [get_gradient_edge(root) for root in roots]
    order = _post_order(edge.node for edge in first)
    parents: dict[Any, set[Any]] = {}
    reaching: dict[Any, bool] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        reaching[node] = node in targets or any(reaching[child] for child in children)
        for child in children:
            parents.setdefault(child, set()).add(node)
    branches = [
        _Branch(None, [(edge.node, edge.output_nr)], number)
        for number, edge in enumerate(first)
        if not reaching[edge.node]
    ]
    for branch in branches:
        parents.setdefault(branch.entries[0][0], set()).add(branch)
    for node in order:
        if reaching[node]:
            entries = {
                (child, number) for child, number in node.next_functions if child is not None and not reaching[child]
            }
            if entries:
                branches.append(_Branch(node, sorted(entries, key=lambda entry: (order[entry[0]], entry[1]))))
    leaves = {entry: _leaves(entry[0]) for branch in branches for entry in branch.entries}
    late = set().union(*(found for (child, _), found in leaves.items() if len(parents[child]) > 1))
    grown = True
    while grown:  # a weight is reached in one of the two ways, with all that hangs on its entries
        before = len(late)
        late.update(*(found for found in leaves.values() if found & late))
        grown = len(late) > before
    for branch in branches:
        branch.entries = [entry for entry in branch.entries if not leaves[entry] & late]
    branches = [branch for branch in branches if branch.entries]
    ends = [set().union(*(leaves[entry] for entry in branch.entries)) for branch in branches]
    led_to = Counter(node for found in ends for node in found)
    for branch, found in zip(branches, ends, strict=True):
        if all(led_to[node] == 1 for node in found):
            branch.weights = [node.variable for node in sorted(found, key=order.__getitem__)]
    return branches, [node.variable for node in order if node in late]


def _post_order(nodes: Iterable[Any]) -> dict[Any, int]:
    """All nodes below, each after its children, numbered."""
    order: dict[Any, int] = {}
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(node, False) for node in nodes]
    while stack:
        node, done = stack.pop()
        if done:
            order[node] = len(order)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order


def _leaves(node: Any) -> set[Any]:
    """The accumulators of gradients that a node leads to."""
    return {one for one in _post_order([node]) if hasattr(one, "variable")}
