"""Traffic made up, to try eviction policies on what they were not tuned on. The same seed gives the same requests.

A request is a tuple of numbers, each of which names a block with all that comes before it: prefixes are shared as in life.
"""

import random
from itertools import accumulate


def _pick(dice, weights):
    totals = list(accumulate(weights))
    return lambda: dice.choices(range(len(totals)), cum_weights=totals)[0]


def _zipf(n, skew):
    return [1 / rank**skew for rank in range(1, n + 1)]


def zipf(seed, requests=3000, prompts=1500, skew=0.9, longest=30):
    """Prompts asked again and again, some more often than others."""
    dice = random.Random(seed)
    texts = [tuple(range(at * longest, at * longest + dice.randint(1, longest))) for at in range(prompts)]
    dice.shuffle(texts)
    pick = _pick(dice, _zipf(prompts, skew))
    return [texts[pick()] for _ in range(requests)]


def scans(seed, rounds=40):
    """Popular prompts, and between them long rows of prompts that nobody asks again."""
    dice = random.Random(seed)
    popular = zipf(seed, 100 * rounds, 150, 0.7, 12)
    trace, fresh = [], 1_000_000
    for at in range(rounds):
        trace += popular[100 * at : 100 * (at + 1)]
        if at % 2:
            for _ in range(dice.randint(20, 60)):
                trace.append(tuple(range(fresh, fresh + 20)))
                fresh += 20
    return trace


def loops(seed, laps=12, lap=400):
    """The same prompts over and over in the same order, as an evaluation does, with a few others between."""
    dice = random.Random(seed)
    texts = [tuple(range(10_000 * at, 10_000 * at + dice.randint(3, 12))) for at in range(lap)]
    head = tuple(range(-8, 0))  # all have the same system prompt
    others = zipf(seed + 1, laps * lap // 8, 200, 0.8, 8)
    trace = []
    for at in range(laps * lap):
        trace.append(head + texts[at % lap])
        if at % 8 == 7:
            trace.append(tuple(-1000 - block for block in others[at // 8]))
    return trace


def shifts(seed, periods=6, requests=700):
    """What is popular is forgotten after a while, and something else is popular."""
    dice = random.Random(seed)
    trace = []
    for period in range(periods):
        base = period * 1_000_000
        texts = [tuple(range(base + 100 * at, base + 100 * at + dice.randint(4, 20))) for at in range(300)]
        pick = _pick(dice, _zipf(len(texts), 0.9))
        trace += [texts[pick()] for _ in range(requests)]
    return trace


def talks(seed, sessions=700, alive=40, turns=8, system_prompts=12, system_blocks=10):
    """Conversations: each turn is asked with all that came before it, and many take turns at once."""
    dice = random.Random(seed)
    systems = [tuple(range(-1000 * at - system_blocks, -1000 * at)) for at in range(1, system_prompts + 1)]
    pick = _pick(dice, _zipf(system_prompts, 1.2))
    trace, fresh, open_talks, begun = [], 0, [], 0
    while begun < sessions or open_talks:
        while begun < sessions and len(open_talks) < alive:
            open_talks.append([systems[pick()], dice.randint(1, 2 * turns)])
            begun += 1
        talk = open_talks[min(int(dice.expovariate(4 / alive)), len(open_talks) - 1)]
        more = dice.randint(1, 8)
        talk[0] += tuple(range(fresh, fresh + more))
        fresh += more
        trace.append(talk[0])
        talk[1] -= 1
        if not talk[1]:
            open_talks.remove(talk)
    return trace


def agents(seed, tasks=500):
    """Many short tasks with a long common instruction each kind, tools called in between, nothing asked after the end."""
    return talks(seed, sessions=tasks, alive=15, turns=3, system_prompts=40, system_blocks=60)


KINDS = {kind.__name__: kind for kind in (zipf, scans, loops, shifts, talks, agents)}
