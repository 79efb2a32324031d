"""A mesh of ranks: replicas of the model along one axis, parts of a model or of a sample along the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.registry import parse_options

Schedule = Literal["naive", "gpipe", "1f1b"]


@dataclass(frozen=True)
class Layout:
    """How many ranks there are along each axis, and how they work: what `tensor=2,data=2` says."""

    data: int = 0
    """Replicas; 0 is as many as the ranks allow."""
    tensor: int = 1
    """Ranks that share out the layers of a model."""
    pipeline: int = 1
    """Ranks that have successive layers."""
    domain: str = "1"
    """Ranks that share out each image: by rows, or rows x columns as in 2x2."""
    microbatches: int = 0
    """Pieces of a batch that are on their way through a pipeline; 0 is four for each of its stages."""
    schedule: Schedule = "1f1b"
    """In which order a pipeline's stages take them."""
    stages: str = ""
    """Layers of each stage, such as 3+2+2; empty is by measured cost."""

    @classmethod
    def parse(cls, text: str) -> Layout:
        layout = cls(**parse_options(cls, "layout", text))
        for axis in ("tensor", "pipeline"):
            if getattr(layout, axis) < 1:
                raise UserError(f"layout: {axis} must be 1 or more, got {getattr(layout, axis)}")
        if layout.data < 0 or layout.microbatches < 0:
            raise UserError("layout: data and microbatches must be 1 or more; leave them out for what suits")
        if layout.rows * layout.columns > 1 and layout.shares_layers:
            raise UserError("layout: domain goes with data, not with tensor or pipeline; leave one of them out")
        if layout.pipeline == 1 and (layout.microbatches or layout.stages):
            raise UserError("layout: microbatches and stages are a pipeline's; add pipeline=2, or leave them out")
        return layout

    def __str__(self) -> str:
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ",".join(f"{name}={value}" for name, value in chosen.items() if value != getattr(Layout, name))

    @property
    def rows(self) -> int:
        return self._grid[0]

    @property
    def columns(self) -> int:
        return self._grid[1]

    @property
    def _grid(self) -> tuple[int, int]:
        parts = self.domain.split("x")
        if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > 2:
            raise UserError(f"layout: domain must be a number of ranks like 2, or a grid like 2x2; got {self.domain!r}")
        return int(parts[0]), int(parts[1]) if len(parts) > 1 else 1

    @property
    def ranks(self) -> int:
        """That have parts of one model or sample."""
        return self.tensor * self.pipeline * self.rows * self.columns

    @property
    def shares_layers(self) -> bool:
        """Whether a rank lacks some of the model's weights; tiles of an image go with all of them."""
        return self.tensor * self.pipeline > 1

    def over(self, ranks: int | None) -> Layout:
        """The same with its replicas counted, for so many ranks; None is one replica unless it says otherwise."""
        replicas = self.data or (1 if ranks is None else ranks // self.ranks)
        if ranks is not None and replicas * self.ranks != ranks:
            raise UserError(f"layout: {self._product(replicas)} is not {ranks} ranks; train on {self._least(ranks)}")
        return dataclasses.replace(self, data=replicas)

    def _product(self, replicas: int) -> str:
        axes = {"data": replicas if self.data else 0, "tensor": self.tensor, "pipeline": self.pipeline}
        grid = [f"domain={self.domain}"] if self.rows * self.columns > 1 else []
        return " x ".join([f"{axis}={size}" for axis, size in axes.items() if size > (axis != "data")] + grid)

    def _least(self, ranks: int) -> int:
        """The number of ranks nearest to `ranks` that would do."""
        return (self.data or max(round(ranks / self.ranks), 1)) * self.ranks


class Mesh:
    """This rank's place in it. Ranks with parts of one model are neighbours, those of a tensor the closest.

    Ranks behind the replicas are servers, which have parts as replicas do.
    """

    def __init__(self, comm: Comm, layout: Layout) -> None:
        training = layout.data * layout.ranks
        assert comm.size >= training and comm.size % layout.ranks == 0
        inner = comm.rank % layout.ranks
        stage, within = divmod(inner, layout.ranks // layout.pipeline)
        self.layout = layout
        self.world = comm
        self.is_server = comm.rank >= training
        self.everyone = comm.split(int(self.is_server), comm.rank) if comm.size > training else comm
        """All who train; for a server, all servers."""
        self.data = comm.split(inner, comm.rank)
        """The ranks that have the same part: of every replica, then the servers'."""
        self.model = comm.split(comm.rank // layout.ranks, comm.rank)
        """The ranks that have the parts of this replica."""
        self.within = self.model.split(stage, comm.rank)
        """Of these, the ones that have the same layers: a tensor's or a domain's."""
        self.stages = self.model.split(within, comm.rank)
        """Of these, the pipeline."""
