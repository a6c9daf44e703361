"""All scores of a run, as tables of per-record statistics: metrics, fidelity to full depth, the loss.

Fidelity measures how close a method is to the same model at full depth, and needs no reference. Free-running figures
compare the two greedy outputs. Teacher-forced figures compare the predictions at each token of the full-depth output,
by the exact parallel form of a schedule. The loss of given texts, such as references, is measured in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipdecode.common.bootstrap import Table, ratio_of_sums
from skipdecode.data.batches import Batch, collate
from skipdecode.data.examples import Example
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request, Sampling
from skipdecode.evaluation.metrics import FIDELITY, METRICS, check_metric
from skipdecode.generation.speed import batches
from skipdecode.models.attach import Attachment
from skipdecode.models.forward import response_logits
from skipdecode.schedule import Schedule

Texts = Sequence[Sequence[int]]
Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]
T = TypeVar("T")

_FORCED_ROWS = 256  # tokens of a forward: their logits of a large vocabulary are 150 MB
IN_NATS = ("kl", "loss")
"""Lower is better; all other figures are in percent."""


def ratio_score(name: str, total: Table) -> float:
    """A figure of `FIDELITY` from summed rows, shape (2,): percent, or nats."""
    return ratio_of_sums(total) * (1.0 if name in IN_NATS else 100.0)


def free_running(outputs: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> dict[str, Table]:
    """Tables (records, 2) of full_depth_agreement and token_agreement, from tokens of a method and of full depth."""
    exact, tokens = [], []
    for ours, theirs in zip(outputs, full, strict=True):
        exact.append((list(ours) == list(theirs), 1))
        tokens.append((sum(a == b for a, b in zip(ours, theirs, strict=False)), max(len(ours), len(theirs))))
    return {"full_depth_agreement": table_of(exact), "token_agreement": table_of(tokens)}


def table_of(rows: Any) -> Table:
    """Rows (numerator, denominator) as an array, shape (records, 2)."""
    return np.asarray(rows, dtype=np.float64).reshape(-1, 2)


def scorer_of(name: str) -> Callable[[Table], float]:
    """From the summed statistics of a metric or fidelity figure to its score; loads no model.

    Raises UsageError: the name is neither.
    """
    if name in FIDELITY:
        return partial(ratio_score, name)
    score: Callable[[Table], float] = METRICS[check_metric(name, *FIDELITY)].score
    return score


def token_fidelity(
    model: Any, schedule: Schedule, prompts: Texts, full: Texts, teacher: Any = None
) -> list[dict[str, NDArray[np.float64]]]:
    """top1_agreement and kl at every token of each row's full-depth output, without gradients.

    Token j of an output runs `schedule.layers(j)`, as in cached decoding. Nothing is attached to the models; the full
    depth of `teacher`, by default of the model, gives the expected distribution.
    """
    batch = _batch(prompts, full, model.device)
    with torch.inference_mode(), Attachment(model, schedule) as attachment:
        if teacher is None or teacher is model:
            with attachment.paused():
                expected = response_logits(model, batch, attached=False)
        else:
            with Attachment(teacher, Schedule.full(schedule.num_layers)):
                expected = response_logits(teacher, batch)
        student = response_logits(model, batch)
        rows = []
        for wanted, got, ids in zip(expected, student, full, strict=True):
            known, guess = (_log_probabilities(logits, ids) for logits in (wanted, got))
            rows.append(
                {
                    "top1_agreement": (guess.argmax(-1) == known.argmax(-1)).double().cpu().numpy(),
                    "kl": (known.exp() * (known - guess)).sum(-1).double().cpu().numpy(),
                }
            )
        return rows


def text_scores(
    backend: Backend,
    schedule: Schedule,
    prompts: Texts,
    texts: Texts,
    batch_size: int,
    advance: Callable[[int], object],
) -> list[Scored]:
    """At every token of each text: cross-entropy in nats, and whether the token is the most probable one.

    Token j of a text runs `schedule.layers(j)`. The fast engine decodes with the weights that it has, and only the
    tokens of the text may come; prompts that begin alike share what they have in common. Where the engine is
    transformers', it is the teacher-forced parallel form. `advance` gets numbers of finished texts.
    """
    order = [i for i, text in enumerate(texts) if len(text)]
    order.sort(key=lambda i: (-len(prompts[i]), prompts[i], -len(texts[i])))
    before, after = ([of_all[i] for i in order] for of_all in (prompts, texts))
    scored: list[Any] = [([], []) for _ in order]
    if backend.fast is None:
        scored = along(partial(_token_scores, backend.model, schedule), before, after, batch_size, advance)
    else:
        engine = backend.engine(schedule, max_rows=batch_size, in_order=True, prefix_cache=True)
        size, ahead = backend.fast.vocab_size, max(1, _FORCED_ROWS // batch_size - 1)
        how = (Sampling(grammar=_Only(text, size, ahead), top_logprobs=1) for text in after)
        forced = zip(before, after, how, strict=True)
        for out in engine.run(Request(tuple(p), len(text), each, exact=False) for p, text, each in forced):
            losses, best = scored[out.request]
            losses.append(-out.logprob)
            best.append(out.top[0][0] == out.token)
            advance(int(out.finish_reason is not None))
        engine.close()
    scores = dict(zip(order, scored, strict=True))
    each = (scores.get(i, ([], [])) for i in range(len(texts)))
    return [(np.array(losses, dtype=np.float64), np.array(best, dtype=bool)) for losses, best in each]


def _token_scores(model: Any, schedule: Schedule, prompts: Texts, texts: Texts) -> list[Scored]:
    """`text_scores` of one batch by transformers."""
    batch, scores = _batch(prompts, texts, model.device), []
    with torch.inference_mode(), Attachment(model, schedule):
        for logits, targets, ids in zip(response_logits(model, batch), batch.targets, texts, strict=True):
            known, wanted = _log_probabilities(logits, ids), targets[: len(ids), None]
            losses, top = -known.gather(-1, wanted).squeeze(-1), known.argmax(-1) == wanted.squeeze(-1)
            scores.append((losses.double().cpu().numpy(), top.cpu().numpy()))
    return scores


class _Only:
    """A `Sampling.grammar` of one text, for a vocabulary of `size` tokens; `ahead` tokens are run together."""

    def __init__(self, tokens: Sequence[int], size: int, ahead: int) -> None:
        self._tokens, self._size, self._ahead, self._at = tokens, size, ahead, 0

    def deep_copy(self) -> _Only:
        return _Only(self._tokens, self._size, self._ahead)

    def compute_bitmask(self) -> bytes:
        return (1 << self._tokens[self._at]).to_bytes(-(-self._size // 8), "little")

    def compute_ff_tokens(self) -> Sequence[int]:
        return self._tokens[self._at : self._at + self._ahead]

    def consume_token(self, token: int) -> None:
        self._at += 1

    def is_error(self) -> bool:
        return False


def along(
    measure: Callable[..., list[T]], prompts: Texts, texts: Texts, batch_size: int, advance: Callable[[int], object]
) -> list[T]:
    """A measure of prompts and texts for each text, in batches of similar length; `advance` gets their sizes."""
    values: dict[int, T] = {}
    for indices in batches([len(ids) + len(text) for ids, text in zip(prompts, texts, strict=True)], batch_size):
        rows = ([of_all[i] for i in indices] for of_all in (prompts, texts))
        values |= zip(indices, measure(*rows), strict=True)
        advance(len(indices))
    return [values[i] for i in range(len(texts))]


def sums(rows: Sequence[NDArray[np.float64]]) -> Table:
    """Sum and number of tokens of each row, shape (rows, 2)."""
    return np.array([[row.sum(), len(row)] for row in rows])


def _batch(prompts: Texts, texts: Texts, device: Any) -> Batch:
    return collate([Example("", tuple(p), tuple(t)) for p, t in zip(prompts, texts, strict=True)]).to(device)


def _log_probabilities(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Of the next token at each place of a row, (tokens, vocabulary); row by row to spare memory."""
    return torch.log_softmax(logits[: len(ids)].float(), dim=-1)
