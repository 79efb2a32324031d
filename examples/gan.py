"""A generative adversarial network: two models and two optimizers under one strategy.

    hocket launch -n 2 examples/gan.py
    mpiexec -n 2 python examples/gan.py
    torchrun --nproc-per-node 2 examples/gan.py
    python examples/gan.py

The generator learns to put points on a circle, the discriminator to tell them from real ones. `team.prepare` is called
once for each pair of model and optimizer; each batch of `team.shard` counts for a step of both. Each worker draws noise
of its own: from the first `prepare` on, random numbers differ from worker to worker.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

NOISE, BATCH, EPOCHS = 4, 128, 16


def circle(count: int) -> Tensor:
    """Points at distance 2 from the origin, give or take."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(count, generator=generator) * 2 * math.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * 2
    return points + 0.05 * torch.randn(count, 2, generator=generator)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, outputs)
    )


def judge(generator: nn.Module, discriminator: nn.Module) -> dict[str, float]:
    """How far from the circle the generated points are, and how much of it they reach."""
    points = generator(torch.randn(500, NOISE, generator=torch.Generator().manual_seed(1)))
    distance = (points.norm(dim=1) - 2).abs().mean()
    sector = ((torch.atan2(points[:, 1], points[:, 0]) + math.pi) / (2 * math.pi) * 12).long()
    return {"distance": float(distance), "reached": len(sector.unique()) / 12}


def main() -> None:
    torch.manual_seed(0)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    with hocket.join("allreduce") as team:
        generator, of_generator = team.prepare(generator, of_generator)
        discriminator, of_discriminator = team.prepare(discriminator, of_discriminator)
        loader = team.shard(TensorDataset(circle(4096)), batch_size=BATCH // team.size)
        first = team.evaluate(judge)
        for _ in range(EPOCHS):
            for (real,) in loader:
                made = generator(torch.randn(len(real), NOISE))

                of_discriminator.zero_grad()
                (F.softplus(-discriminator(real)) + F.softplus(discriminator(made.detach()))).mean().backward()
                of_discriminator.step()

                of_generator.zero_grad()
                F.softplus(-discriminator(made)).mean().backward()
                of_generator.step()
            last = team.evaluate(judge)
    if team.rank == 0:
        for when, found in (("before", first), ("after", last)):
            print(f"{when}: {found['distance']:.3f} from the circle, {found['reached']:.2f} of it reached")


if __name__ == "__main__":
    main()
