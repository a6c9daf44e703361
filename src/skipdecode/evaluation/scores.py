"""All scores of a run, as tables of per-record statistics: metrics, fidelity to full depth, the loss.

Fidelity measures how close a method is to the same model at full depth, and needs no reference. Free-running figures
compare the two greedy outputs. Teacher-forced figures compare the predictions at each token of the full-depth output,
by the exact parallel form of a schedule. The loss of given texts, such as references, is measured in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipdecode.common.bootstrap import Table, ratio_of_sums
from skipdecode.data.batches import Batch, collate
from skipdecode.data.examples import Example
from skipdecode.engine.base import Engine
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request, Sampling
from skipdecode.evaluation.metrics import FIDELITY, METRICS, check_metric
from skipdecode.generation.speed import batches
from skipdecode.models.attach import Attachment
from skipdecode.models.forward import response_logits
from skipdecode.schedule import Schedule

Texts = Sequence[Sequence[int]]
T = TypeVar("T")

_FORCED_ROWS = 256  # tokens of a forward: their logits of a large vocabulary are 150 MB
IN_NATS = ("kl", "loss")
"""Lower is better; all other figures are in percent."""


class TokenScores(NamedTuple):
    """The cross-entropy of each token of a text, in nats, and whether it is the most probable token."""

    losses: NDArray[np.float64]
    best: NDArray[np.bool_]


def ratio_score(name: str, total: Table) -> float:
    """A figure of `FIDELITY` from summed rows, shape (2,): percent, or nats."""
    return ratio_of_sums(total) * (1.0 if name in IN_NATS else 100.0)


def agreement_tables(outputs: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> dict[str, Table]:
    """Tables (records, 2) of full_depth_agreement and token_agreement, from tokens of a method and of full depth."""
    exact, tokens = [], []
    for output, expected in zip(outputs, full, strict=True):
        exact.append((list(output) == list(expected), 1))
        equal = sum(a == b for a, b in zip(output, expected, strict=False))
        tokens.append((equal, max(len(output), len(expected))))
    return {"full_depth_agreement": ratio_table(exact), "token_agreement": ratio_table(tokens)}


def ratio_table(rows: Any) -> Table:
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
        for of_teacher, of_student, ids in zip(expected, student, full, strict=True):
            p, q = (_log_probabilities(logits, ids) for logits in (of_teacher, of_student))
            agreement, kl = q.argmax(-1) == p.argmax(-1), (p.exp() * (p - q)).sum(-1)
            rows.append({"top1_agreement": agreement.double().cpu().numpy(), "kl": kl.double().cpu().numpy()})
        return rows


def text_scores(
    backend: Backend,
    schedule: Schedule,
    prompts: Texts,
    texts: Texts,
    batch_size: int,
    advance: Callable[[int], object],
) -> list[TokenScores]:
    """The scores of the tokens of each text.

    Token j of a text runs `schedule.layers(j)`. The fast engine decodes with the weights that it has, and only the
    tokens of the text may come; prompts that begin alike share what they have in common. Where the engine is
    transformers', it is the teacher-forced parallel form. `advance` gets numbers of finished texts.
    """
    order = [i for i, text in enumerate(texts) if len(text)]
    order.sort(key=lambda i: (-len(prompts[i]), prompts[i], -len(texts[i])))
    ordered = [prompts[i] for i in order], [texts[i] for i in order]
    if backend.fast is None:
        measure = partial(_teacher_forced_scores, backend.model, schedule)
        scored = measure_in_batches(measure, *ordered, batch_size, advance)
    else:
        engine = backend.engine(schedule, max_rows=batch_size, in_order=True, prefix_cache=True)
        ahead = max(1, _FORCED_ROWS // batch_size - 1)
        scored = _decoded_scores(engine, backend.fast.vocab_size, *ordered, ahead, advance)
    scores, empty = dict(zip(order, scored, strict=True)), TokenScores(np.empty(0), np.empty(0, bool))
    return [scores.get(i, empty) for i in range(len(texts))]


def _decoded_scores(
    engine: Engine, vocabulary: int, prompts: Texts, texts: Texts, ahead: int, advance: Callable[[int], object]
) -> list[TokenScores]:
    """`text_scores` by decoding, `ahead` tokens of a text in one forward."""
    requests = (
        Request(tuple(prompt), len(text), Sampling(grammar=_Only(text, vocabulary, ahead), top_logprobs=1), exact=False)
        for prompt, text in zip(prompts, texts, strict=True)
    )
    losses, best = ([list[Any]() for _ in texts] for _ in range(2))
    for out in engine.run(requests):
        losses[out.request].append(-out.logprob)
        best[out.request].append(out.top[0][0] == out.token)
        advance(int(out.finish_reason is not None))
    engine.close()
    return [TokenScores(np.array(loss), np.array(is_best)) for loss, is_best in zip(losses, best, strict=True)]


def _teacher_forced_scores(model: Any, schedule: Schedule, prompts: Texts, texts: Texts) -> list[TokenScores]:
    """`text_scores` of one batch by transformers."""
    batch, scores = _batch(prompts, texts, model.device), []
    with torch.inference_mode(), Attachment(model, schedule):
        for logits, labels, ids in zip(response_logits(model, batch), batch.targets, texts, strict=True):
            logprobs, targets = _log_probabilities(logits, ids), labels[: len(ids), None]
            losses, best = -logprobs.gather(-1, targets).squeeze(-1), logprobs.argmax(-1) == targets.squeeze(-1)
            scores.append(TokenScores(losses.double().cpu().numpy(), best.cpu().numpy()))
    return scores


class _Only:
    """A `Sampling.grammar` of one text, for a vocabulary of `size` tokens; `ahead` tokens are run together."""

    def __init__(self, tokens: Sequence[int], size: int, ahead: int) -> None:
        self._tokens, self._size, self._ahead, self._position = tokens, size, ahead, 0

    def deep_copy(self) -> _Only:
        return _Only(self._tokens, self._size, self._ahead)

    def compute_bitmask(self) -> bytes:
        return (1 << self._tokens[self._position]).to_bytes(-(-self._size // 8), "little")

    def compute_ff_tokens(self) -> Sequence[int]:
        return self._tokens[self._position : self._position + self._ahead]

    def consume_token(self, token: int) -> None:
        self._position += 1

    def is_error(self) -> bool:
        return False


def measure_in_batches(
    measure: Callable[..., list[T]], prompts: Texts, texts: Texts, batch_size: int, advance: Callable[[int], object]
) -> list[T]:
    """A measure of prompts and texts for each text, in batches of similar length; `advance` gets their sizes."""
    values: dict[int, T] = {}
    for indices in batches([len(ids) + len(text) for ids, text in zip(prompts, texts, strict=True)], batch_size):
        measured = measure([prompts[i] for i in indices], [texts[i] for i in indices])
        values |= zip(indices, measured, strict=True)
        advance(len(indices))
    return [values[i] for i in range(len(texts))]


def token_sums(rows: Sequence[NDArray[np.float64]]) -> Table:
    """Sum and number of tokens of each row, shape (rows, 2)."""
    return np.array([[row.sum(), len(row)] for row in rows])


def _batch(prompts: Texts, texts: Texts, device: Any) -> Batch:
    return collate([Example("", tuple(p), tuple(t)) for p, t in zip(prompts, texts, strict=True)]).to(device)


def _log_probabilities(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Of the next token at each place of a row, (tokens, vocabulary); row by row to spare memory."""
    return torch.log_softmax(logits[: len(ids)].float(), dim=-1)
