"""Pipeline stages of equal expected work: a layer that most tokens sit out weighs less. Pure Python."""

from __future__ import annotations

from skipdecode.schedule import Schedule

__all__ = ["PARTITION_VARIABLE", "layers_of_stages"]

PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"
"""Where vLLM reads the number of layers of each stage."""

_PROMPT_SHARE = 0.05
"""Work of a layer on a prompt token, next to that on a generated one: prompts are computed many at a time."""


def layers_of_stages(schedule: Schedule, stages: int) -> list[int]:
    """Layers of each of `stages` pipeline stages, so that the busiest stage has as little decode work as possible.

    Work of a layer: the share of the listed generation positions that run it. Each stage gets a layer or more.
    """
    run = [0] * schedule.num_layers
    for position in range(schedule.seq_len):
        for layer in schedule.layers(position):
            run[layer] += 1
    # A layer that is hardly run still takes the prompts.
    work = [r / schedule.seq_len + _PROMPT_SHARE for r in run]
    return _fewest(work, stages)


def _fewest(work: list[float], stages: int) -> list[int]:
    """Cut `work` into parts so that the largest sum is least; of equals the one with the earliest cuts."""
    layers = len(work)
    sums = [0.0]
    for w in work:
        sums.append(sums[-1] + w)
    # least[s][i]: the largest part's sum when the first i layers make s stages; came[s][i]: the last cut.
    least = [[float("inf")] * (layers + 1) for _ in range(stages + 1)]
    came = [[0] * (layers + 1) for _ in range(stages + 1)]
    least[0][0] = 0
    for s in range(1, stages + 1):
        for i in range(s, layers + 1):
            for j in range(s - 1, i):
                value = max(least[s - 1][j], sums[i] - sums[j])
                if value < least[s][i]:
                    least[s][i], came[s][i] = value, j
    parts, end = [], layers
    for s in range(stages, 0, -1):
        parts.append(end - came[s][end])
        end = came[s][end]
    return parts[::-1]
