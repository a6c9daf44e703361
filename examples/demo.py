"""Show the same words at all layers and under a schedule, with the speed of both, on the bundled adapter for E2E.

python examples/demo.py [SCHEDULE]

The adapter was tuned under this schedule. The first run downloads the embedded model (about 100 MB).
"""

import sys
import time

import skipdecode as sd

RECORDS = [
    "name[The Blue Heron], eatType[pub], food[Italian], priceRange[moderate], area[riverside], near[Old Mill Bakery]",
    "name[Copper Kettle], eatType[coffee shop], food[French], customer rating[5 out of 5], familyFriendly[yes]",
    "name[Saffron Lane], eatType[restaurant], food[Indian], priceRange[cheap], area[city centre]",
    "name[The Lantern], food[Chinese], customer rating[low], area[riverside], familyFriendly[no]",
    "name[Harbour Table], eatType[restaurant], food[fast food], priceRange[more than £30], near[Grand Pier Hotel]",
    "name[Green Olive], eatType[pub], priceRange[high], customer rating[3 out of 5], near[Mercer's Yard]",
]
ROUNDS = 3


def measure(llm: sd.LLM, schedule: str) -> tuple[list[str], float]:
    """The texts under a schedule, and the new tokens in a second of the fastest round."""
    rates = []
    for _ in range(ROUNDS):
        fresh = sd.LLM(llm.loaded)  # no prompt is cached, and no draft comes from an earlier text
        start = time.perf_counter()
        outputs = fresh.generate([{"mr": record} for record in RECORDS], 64, schedule=schedule, exact=False)
        rates.append(sum(len(output.tokens) for output in outputs) / (time.perf_counter() - start))
    return [output.text.strip() for output in outputs], max(rates)


def main(schedule: str = "3x:p10", model: str = "e2e-smollm2-135m") -> float:
    """Print the texts and the speed-up; returns the speed-up."""
    llm = sd.LLM(model)
    whole, slow = measure(llm, "full")
    texts, fast = measure(llm, schedule)
    for record, before, after in zip(RECORDS, whole, texts, strict=True):
        print(f"\n> {record}\n  all layers: {before}\n  {schedule}: {after}")
    layers = llm.schedule_of(schedule).mean_budget(64)
    print(f"\n{fast / slow:.1f} times as fast: {slow:.0f} and {fast:.0f} tokens/s,", end=" ")
    print(f"{llm.num_layers} and {layers:.1f} layers for a new token")
    return fast / slow


if __name__ == "__main__":
    main(*sys.argv[1:2])
