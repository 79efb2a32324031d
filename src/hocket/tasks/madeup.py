"""A made-up text of simple sentences, in which words of a kind stand in the same places."""

from __future__ import annotations

import numpy as np

from hocket.tasks.corpus import Corpus, Facts

SENTENCES = 40_000

KINDS = {
    "ANIMAL": "cat dog horse cow sheep goat fox wolf bear lion tiger mouse rabbit deer pig hen duck goose owl crow",
    "PERSON": "king queen man woman boy girl father mother brother sister uncle aunt doctor teacher farmer baker",
    "NUMBER": "zero one two three four five six seven eight nine ten eleven twelve",
    "COLOUR": "red green blue yellow black white brown grey pink purple orange",
    "FOOD": "bread cheese milk butter honey apples pears plums rice beans soup cake",
    "PLACE": "house garden forest river field barn village town market castle bridge mill",
    "MOVES": "runs walks jumps swims climbs sleeps hides waits sits stands",
    "TAKES": "sees likes finds follows hears fears calls knows",
    "EATS": "eats tastes cooks buys sells brings",
    "DAY": "monday tuesday wednesday thursday friday saturday sunday",
}
SENTENCE_FORMS = (
    "the COLOUR ANIMAL MOVES in the PLACE",
    "the PERSON TAKES the COLOUR ANIMAL",
    "the PERSON EATS FOOD and FOOD on DAY",
    "NUMBER and NUMBER are more than NUMBER",
    "the ANIMAL TAKES the PERSON near the PLACE",
    "on DAY the PERSON MOVES to the PLACE",
    "a PERSON has NUMBER COLOUR ANIMAL of the PLACE",
)


def made_up_text(seed: int) -> Corpus:
    """About 300,000 words; a sentence is a line."""
    rng = np.random.default_rng(seed)
    forms = rng.integers(len(SENTENCE_FORMS), size=SENTENCES)
    words: list[str] = []
    for form in forms:
        for place in SENTENCE_FORMS[form].split():
            kind = KINDS.get(place)
            if kind is None:
                words.append(place)
            else:
                chosen = kind.split()
                words.append(chosen[int(len(chosen) * rng.random() ** 2)])  # some are more frequent
        words.append("\n")
    names, numbers, counts = np.unique(words, return_inverse=True, return_counts=True)
    order = np.argsort(np.where(names == "\n", 1, -counts), kind="stable")  # line ends last
    place_of = np.argsort(order)
    ids = place_of[numbers].astype(np.int32)
    ids[ids == len(names) - 1] = -1
    known = order[:-1]
    raw = int(counts[known].sum())
    return Corpus(ids[:-1], [str(name) for name in names[known]], counts[known], Facts(raw, len(known), 0), True)
