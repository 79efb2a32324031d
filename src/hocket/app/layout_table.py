"""How a layout splits a model, as a table."""

from __future__ import annotations

import torch
from rich.table import Table

from hocket.core.errors import UserError
from hocket.layouts.survey import Layer, survey
from hocket.run.train import Training


def _layers(training: Training) -> list[Layer]:
    plan = training.plan
    if plan.made_layout.ranks == 1:
        raise UserError("say how the model shall be split, such as --layout tensor=2")
    inputs, _ = training.train.take(torch.arange(plan.batch))
    return survey(training.task.build_model(plan.seed), plan.made_layout, inputs)


def rows(training: Training) -> Table:
    """One row a layer."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("layer", "kind", "split", "parameters", "of a rank", "bytes a step"):
        table.add_column(column, justify="right" if column in ("parameters", "of a rank", "bytes a step") else "left")
    for layer in _layers(training):
        numbers = (f"{number:,}" for number in (layer.parameters, layer.own, layer.sent))
        table.add_row(layer.name or "the model", layer.kind, layer.how, *numbers)
    return table


def summary(training: Training) -> str:
    """Parameters and bytes of all layers together."""
    plan, layers = training.plan, _layers(training)
    whole, places = sum(layer.parameters for layer in layers), {layer.place for layer in layers}
    if plan.made_layout.pipeline == 1:
        own = sum(layer.own for layer in layers)
    else:
        own = max(sum(layer.own for layer in layers if layer.place == place) for place in places)
    sent = sum(layer.sent for layer in layers)
    shared = plan.made_layout.ranks > plan.made_layout.pipeline and not plan.made_strategy.lockstep
    alike = sum(layer.parameters for layer in layers if layer.own == layer.parameters) if shared else 0
    also = f", and the {alike:,} parameters that several of them have whole" if alike else ""
    return (
        f"{plan.layout} on {plan.training_ranks} ranks: a rank has up to {own:,} of {whole:,} parameters; the ranks of "
        f"a model send each other {sent:,} bytes a step of {plan.batch} samples{also}"
    )
