"""What ``run.json`` says of one method: scores, speed, buckets of lengths, samples for readers, the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.common.environment import environment
from skipdecode.evaluation.buckets import Bucket, buckets_of
from skipdecode.evaluation.generate import Outputs
from skipdecode.evaluation.methods.base import Method
from skipdecode.evaluation.results import FORMAT, OUTPUTS_FILE
from skipdecode.evaluation.scored import Scored
from skipdecode.evaluation.settings import Settings

__all__ = ["document"]


def document(
    rows: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    method: Method,
    scored: Scored,
    outputs: Outputs,
    settings: Settings,
) -> dict[str, Any]:
    """The document of a method's results, JSON-ready.

    Parameters
    ----------
    rows : sequence of mapping
        What ``outputs.jsonl`` says of each record.
    about : mapping
        The run's ``config``.
    scored, outputs
        The same method's scores, and its outputs next to full depth's.
    """
    lengths = {axis: [int(row[axis]) for row in rows] for axis in ("prompt_tokens", "reference_tokens")}
    return {
        "format": FORMAT,
        "kind": "eval",
        "name": f"{about['name']} {method.name}" if about.get("name") else method.name,
        "n": len(rows),
        **_speed(method, outputs, settings),
        "metrics": scored.summary(resamples=settings.resamples, seed=settings.seed),
        "buckets": {
            axis: [_bucket(b, scored, outputs) for b in buckets_of(values)] for axis, values in lengths.items()
        },
        "samples": [_sample(rows[i]) for i in _spread(len(rows), settings.samples)],
        "outputs": OUTPUTS_FILE,
        "config": about,
        "environment": environment(),
    }


def _speed(method: Method, outputs: Outputs, settings: Settings) -> dict[str, Any]:
    yardstick = method.full_depth
    measured = outputs.speedup(seed=settings.seed, resamples=settings.resamples)
    nominal = 1.0 if yardstick else None if method.schedule is None else method.schedule.nominal_speedup
    return {
        "nominal_speedup": nominal,
        "measured_speedup": 1.0 if yardstick else None if measured is None else measured.estimate,
        "measured_speedup_interval": None if measured is None else measured.to_dict(),
        "measured_speedup_with_prompt": 1.0 if yardstick else outputs.speedup_with_prompt(),
        "engine": method.engine,
        "speed": outputs.timing.to_dict(),
        "full_depth_speed": outputs.full_timing.to_dict() if outputs.full_timing.rows else None,
    }


def _bucket(bucket: Bucket, scored: Scored, outputs: Outputs) -> dict[str, Any]:
    return {
        "low": bucket.low,
        "high": bucket.high,
        "n": len(bucket.indices),
        "mean_output_tokens": sum(len(outputs.tokens[i]) for i in bucket.indices) / len(bucket.indices),
        "metrics": scored.scores(bucket.indices),
    }


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: row[name] for name in ("id", "prompt", "output")} | {"reference": row["references"][0]}
    return kept | ({"full_output": row["full_output"]} if "full_output" in row else {})


def _spread(total: int, wanted: int) -> list[int]:
    """Indices evenly over the data, the same for every run on it."""
    count = min(total, wanted)
    return [i * total // count for i in range(count)]
