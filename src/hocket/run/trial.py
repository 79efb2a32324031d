"""One batch through the user's model, loss and metric, before anything is started or written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket import optim
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.core.seeds import seeded
from hocket.drivers.plan import Plan
from hocket.layouts.survey import check
from hocket.run.blame import TaskError, blaming
from hocket.tasks import SampleSet, Task


def try_out(plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> Replica:
    """Do what every rank will do, with a model that is thrown away: a mistake shows here."""
    with seeded(plan.seed):
        with blaming("Task.model"):
            model = Replica(task.build_model(plan.seed))
        _check_optimizer(plan, model)
        if plan.device == "cpu":  # elsewhere, only ranks touch the device
            model.model.train()
            loss = _call(task.loss, "loss", model, train, plan)
            if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise TaskError(f"Task.loss must return one number as a tensor with a gradient; it gave {_shape(loss)}")
            model.model.eval()
            if plan.made_layout.ranks > 1:
                check(model.model, plan.made_layout, train.take(torch.arange(plan.batch))[0])
            for name, measure in task.measures.items():
                what = "metric" if task.metrics is None else f"metrics[{name!r}]"
                metric = _call(measure, what, model, test, plan)
                if not (isinstance(metric, (int, float)) or (isinstance(metric, Tensor) and metric.numel() == 1)):
                    raise TaskError(f"Task.{what} must return one number; it gave {_shape(metric)}")
    return model


def _call(function: Any, name: str, model: Replica, samples: SampleSet, plan: Plan) -> Any:
    count = min(plan.batch // plan.accumulate, len(samples))
    with blaming("Task.data"):
        inputs, targets = samples.take(torch.arange(count))
    with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast != "none"):
        with blaming("Task.model"):
            output = model.model(inputs)
        with blaming(f"Task.{name}"):
            return function(output, targets)


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        kept = "" if value.requires_grad else " without one"
        return f"a tensor of shape {list(value.shape)}{kept}"
    return f"a {type(value).__name__}"


def _check_optimizer(plan: Plan, model: Replica) -> None:
    servers = plan.made_strategy.server_ranks()
    if servers > model.x.numel():
        raise UserError(f"{servers} servers cannot share {model.x.numel()} parameters; use fewer servers")
    try:
        optim.make(plan.optimizer, model, plan.lr, plan.momentum)
        if plan.servers:
            optim.make_flat(plan.optimizer, model.x, model.g, plan.lr, plan.momentum)
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(f"optimizer {plan.optimizer}: {error}") from error
