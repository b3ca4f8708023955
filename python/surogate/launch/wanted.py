"""The options of a run's nodes, and the number of nodes that they allow on the machines that there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """The options of nodes."""

    on_ray: bool
    ray_address: str
    num_nodes: int
    min_nodes: int
    max_nodes: int
    #: True if checkpoints are written in the course of the run.
    saves: bool
    #: Ranks of each node, and how many of them are GPUs.
    ranks: int
    gpus: int
    timeout: int
    max_restarts: int
    #: Micro-batches that each rank accumulates; its rows of a step where `batch_size` gives those of all.
    accumulation: int
    #: True if the engine divides the rows of `batch_size`.
    divides_rows: bool
    output_dir: str
    #: Folder of the checkpoints; none for `output_dir`.
    checkpoint_dir: str | None

    @property
    def of_all(self) -> int:
        """Micro-batches of a step, those of ranks with the same number in their node; rows, where the engine divides them."""
        return self.num_nodes * self.accumulation

    def fitting(self, machines: int) -> int:
        """The most nodes, on these machines, whose steps have as many rows; 0 where there are too few."""
        counts = range(min(machines, self.max_nodes), self.min_nodes - 1, -1)
        return next((count for count in counts if self.of_all % count == 0), 0)

    def starting(self, machines: int, before: int, is_late: bool) -> int:
        """Nodes to start on this number of machines; 0 to wait for more. `before` is the number that the run had, 0 at its first
        start; after it was waited for the machines of that number, fewer are enough."""
        if before == 0:
            return self.num_nodes if machines >= self.num_nodes else 0
        count = self.fitting(machines)
        return count if count >= before or is_late else 0

    def larger(self, nodes: int, further: int) -> int:
        """The number of nodes that a run of `nodes` can have with `further` machines more; 0 where it is not larger."""
        count = self.fitting(nodes + further)
        return count if self.saves and count > nodes else 0

    def unused(self) -> str | None:
        """A sentence if `max_nodes` allows no number of nodes above `num_nodes`."""
        if self.max_nodes == self.num_nodes or self.fitting(self.max_nodes) > self.num_nodes:
            return None
        what = "rows" if self.divides_rows else "micro-batches"
        numbers = " or ".join(dict.fromkeys(map(str, (self.num_nodes + 1, self.max_nodes))))
        return (
            f"`distributed.max_nodes: {self.max_nodes}` adds no node: the {self.of_all} {what} of a step cannot be divided "
            f"by {numbers}"
        )
