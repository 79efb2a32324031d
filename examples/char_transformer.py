"""A character-level transformer with AdamW, warm-up and cosine, accumulated gradients and clipping.

    hocket launch -n 2 examples/char_transformer.py
    mpiexec -n 2 python examples/char_transformer.py
    torchrun --nproc-per-node 2 examples/char_transformer.py
    python examples/char_transformer.py

It learns a nursery rhyme that grows by a line each verse, and is judged on the last verse, which it has not seen.
`team.clip_grad_norm_` clips the mean of all workers' gradients, as clipping does after DDP's backward. Gradients that
are accumulated are sent once, at `optimizer.step()`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket

LINES = """This is the house that Jack built.
malt / That lay in
rat / That ate
cat / That killed
dog / That worried
cow with the crumpled horn / That tossed
maiden all forlorn / That milked
man all tattered and torn / That kissed
priest all shaven and shorn / That married
cock that crowed in the morn / That waked
farmer sowing his corn / That kept""".splitlines()
WINDOW, WIDTH, STEPS, ACCUMULATE, BATCH = 48, 64, 240, 2, 24


def rhyme() -> list[str]:
    """The verses, each a line longer than the one before."""
    verses = [LINES[0]]
    rest = "the house that Jack built."
    for line in LINES[1:]:
        who, does = line.split(" / ")
        rest = f"the {who},\n{does} {rest}"
        verses.append(f"This is {rest}")
    return verses


class Transformer(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.out(self.layers(self.letter(text) + self.place.weight[:length], mask, is_causal=True))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    verses = rhyme()
    letters = sorted(set("".join(verses)))
    train, test = (
        torch.tensor([letters.index(c) for c in text]).unfold(0, WINDOW + 1, 1)
        for text in ("\n\n".join(verses[:-1]), verses[-1])
    )
    torch.manual_seed(0)
    model = Transformer(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    with hocket.join("allreduce") as team:
        model, optimizer = team.prepare(model, optimizer)
        loader = team.shard(train, batch_size=BATCH // (ACCUMULATE * team.size), drop_last=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        )
        before = team.evaluate(lambda model: float(loss_of(model, test)))
        batches = 0
        while batches < STEPS * ACCUMULATE:
            for windows in loader:
                (loss_of(model, windows) / ACCUMULATE).backward()
                batches += 1
                if batches % ACCUMULATE == 0:
                    team.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                if batches == STEPS * ACCUMULATE:
                    break
        after = team.evaluate(lambda model: float(loss_of(model, test)))
    if team.rank == 0:
        print(f"loss of the unseen verse: {before:.3f} before, {after:.3f} after")
        text = [letters.index(c) for c in "This is the "]
        for _ in range(60):
            text.append(int(model(torch.tensor([text[-WINDOW:]]))[0, -1].argmax()))
        print("".join(letters[c] for c in text))


if __name__ == "__main__":
    main()
