"""Evaluates schedules against a base model, without references.

On the base model's texts: KL divergence and agreement of the next token. On the texts of each schedule for the same
prompts: the base model's perplexity, next to the perplexity of its own texts. And the share of a fixed set of
instructions that is followed, as far as code can check.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from skipdecode.common.bootstrap import Table, compare, interval, ratio_of_sums
from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import progress_bar
from skipdecode.data.prompts import PromptEncoder
from skipdecode.data.records import Record
from skipdecode.engine.requests import Request, Sampling
from skipdecode.evaluation.methods import Method, batches
from skipdecode.evaluation.scores import ratio_score, table_of
from skipdecode.evaluation.settings import EvaluationSettings
from skipdecode.evaluation.teacher_forced import token_fidelity, token_losses

_BATCHES = 4  # decoded and kept together
_FIRST_BUCKET = 16


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _is_json(text: str, keys: Sequence[str]) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) == set(keys) if keys else isinstance(found, list)


_CHECKS: Mapping[str, Callable[[str, Any], bool]] = {
    "least_words": lambda text, count: len(text.split()) >= count,
    "most_words": lambda text, count: len(text.split()) <= count,
    "sentences": lambda text, count: len(re.findall(r"[.!?]+(?=\s|$)", text)) == count,
    "paragraphs": lambda text, count: len(re.split(r"\n\s*\n", text)) == count,
    "items": lambda text, count: len(re.findall(r"^\s*(?:[-*•]|\d+[.)])\s+\S", text, re.MULTILINE)) == count,
    "has": lambda text, words: all(_has(text, word) for word in words),
    "has_not": lambda text, words: not any(_has(text, word) for word in words),
    "matches": lambda text, pattern: re.fullmatch(pattern, text, re.DOTALL) is not None,
    "json": _is_json,  # an object of these keys; of none, a list
}


def instructions() -> list[dict[str, Any]]:
    """The instructions of this package: each a "prompt", and the "checks" of its answer with their values."""
    text = resources.files("skipdecode.evaluation").joinpath("instructions.json").read_text(encoding="utf-8")
    return list(json.loads(text))


def followed(answer: str, checks: Mapping[str, Any]) -> bool:
    """Whether an answer passes every check; white space around it does not count."""
    return bool(answer.strip()) and all(_CHECKS[kind](answer.strip(), value) for kind, value in checks.items())


@dataclass(frozen=True)
class SelfEvaluation:
    """Measures methods on texts for the same prompts (token ids), with the same random numbers.

    `base` is the base model at full depth, with which the others are compared. `settings` have `max_new_tokens`; `kept`
    has texts that an earlier, interrupted run made.
    """

    base: Method
    tokenizer: Any
    prompts: list[list[int]]
    sampling: Sampling
    ends: frozenset[int]
    settings: EvaluationSettings
    kept: KeptValues

    def texts(self, method: Method) -> list[list[int]]:
        """New tokens of a method's texts, the end token included."""
        return self._decoded("texts", method, self.prompts, self.sampling)

    def obeyed(self, method: Method) -> Table:
        """Whether a chat model follows each of `instructions` with greedy answers, shape (instructions, 2)."""
        wanted = instructions()
        records = [Record(i, i + 1, i, one["prompt"]) for i, one in enumerate(wanted)]
        prompts = [p.token_ids for p in PromptEncoder(self.tokenizer, None, chat=True).encode(records)]
        answers = self._decoded("instructions", method, prompts, Sampling())
        texts = (self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers)
        return table_of([[followed(text, one["checks"]), 1] for one, text in zip(wanted, texts, strict=True)])

    def rows(self, texts: Mapping[Method, list[list[int]]], *, chat: bool) -> list[dict[str, Any]]:
        """The result of each method, from all their texts; `chat`: with instructions. JSON-ready."""
        draws = {"resamples": self.settings.resamples, "seed": self.settings.seed}
        losses = {one: self._along(f"perplexity, {one.name}", token_losses, self.base, texts[one]) for one in texts}
        obeyed = {one: self.obeyed(one) for one in texts} if chat else {}
        found = []
        for one, given in texts.items():
            seen = compare(_sums(losses[self.base]), _sums(losses[one]), _perplexity, **draws)
            row: dict[str, Any] = {
                "name": one.name,
                "nominal_speedup": one.schedule.nominal_speedup,
                "mean_tokens": sum(map(len, given)) / len(given),
                "perplexity": seen.b,
                "of_base": seen.ratio and asdict(seen.ratio),
                "by_position": {"perplexity": _by_position(losses[one], _perplexity)},
            }
            if one is not self.base:
                measure = partial(token_fidelity, teacher=self.base.backend.model)
                tokens = self._along(f"fidelity, {one.name}", measure, one, texts[self.base])
                for name in ("kl", "top1_agreement"):
                    values, score = [row[name] for row in tokens], partial(ratio_score, name)
                    row[name] = asdict(interval(_sums(values), score, **draws))
                    row["by_position"][name] = _by_position(values, score)
            if obeyed:
                pair = compare(obeyed[self.base], obeyed[one], ratio_of_sums, **draws)
                row["instructions"] = {"followed": pair.b, "difference": asdict(pair.difference)}
            found.append(row)
        return found

    def _decoded(self, what: str, method: Method, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        most, size = self.settings.max_new_tokens or 1, self.settings.batch_size
        rows: list[list[int]] = []
        with progress_bar(len(prompts), "text", name=f"{what}, {method.name}") as bar:
            for start in range(0, len(prompts), _BATCHES * size):
                key, part = f"{what} {method.name} {start}", prompts[start : start + _BATCHES * size]
                given = self.kept.get(key)
                if given is None:
                    requests = [
                        Request(tuple(ids), most, sampling.for_row(i), self.ends) for i, ids in enumerate(part, start)
                    ]
                    given = [row.tokens for row in method.make_engine(size).decode(requests)]
                    self.kept.put(key, given)
                rows += given
                bar.update(len(given))
        return rows

    def _along(self, name: str, measure: Callable[..., list[Any]], method: Method, texts: list[list[int]]) -> list[Any]:
        """The values of a measure of a method on each of some texts."""
        found: dict[int, Any] = {}
        lengths = [len(ids) + len(text) for ids, text in zip(self.prompts, texts, strict=True)]
        with progress_bar(len(texts), "text", name=name) as bar:
            for indices in batches(lengths, self.settings.batch_size):
                rows = [[given[i] for i in indices] for given in (self.prompts, texts)]
                found |= zip(indices, measure(method.backend.model, method.schedule, *rows), strict=True)
                bar.update(len(indices))
        return [found[i] for i in range(len(texts))]


def _sums(rows: Sequence[Any]) -> Table:
    return table_of([[row.sum(), len(row)] for row in rows])


def _perplexity(total: Table) -> float:
    return math.exp(ratio_of_sums(total))


def _by_position(rows: Sequence[Any], score: Callable[[Table], float]) -> list[dict[str, Any]]:
    """The score of tokens at positions 0 to 15, 16 to 31, 32 to 63, and so on, doubling."""
    found, low, high = [], 0, _FIRST_BUCKET
    while len(values := np.concatenate([row[low:high] for row in rows])):
        found.append({"low": low, "high": high - 1, "tokens": len(values), "score": score(_sums([values])[0])})
        low, high = high, 2 * high
    return found
