"""The architectures of vLLM whose layers can be skipped, and where their decoder layers are. A new one is a row here.

Each is tested against the transformers path (tests/vllm/test_families.py) before it is listed.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from skipdecode.errors import UnsupportedModelError

__all__ = ["ARCHITECTURES", "find_layers"]

ARCHITECTURES = {
    "Gemma2ForCausalLM": "model.layers",
    "Gemma3ForCausalLM": "model.layers",
    "GemmaForCausalLM": "model.layers",
    "GraniteForCausalLM": "model.layers",
    "LlamaForCausalLM": "model.layers",
    "MistralForCausalLM": "model.layers",
    "MixtralForCausalLM": "model.layers",
    "OPTForCausalLM": "model.decoder.layers",
    "Olmo2ForCausalLM": "model.layers",
    "Phi3ForCausalLM": "model.layers",
    "Qwen2ForCausalLM": "model.layers",
    "Qwen3ForCausalLM": "model.layers",
    "Qwen3MoeForCausalLM": "model.layers",
}


def check_architecture(architecture: str) -> None:
    """Raise UnsupportedModelError unless an architecture is in the table; lists what is."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"skipdecode has not been tested with vLLM's {architecture}: supported are {', '.join(ARCHITECTURES)}"
        )


def find_layers(model: Any, architecture: str) -> tuple[dict[int, Any], int]:
    """The decoder layers that this process holds, by number, and the axis of their inputs that counts rows."""
    check_architecture(architecture)
    try:
        layers = attrgetter(ARCHITECTURES[architecture])(model)
    except AttributeError:
        raise UnsupportedModelError(
            f"vLLM's {type(model).__name__} keeps its decoder layers elsewhere than in {ARCHITECTURES[architecture]}: "
            "this version of vLLM is not supported"
        ) from None
    # With pipeline parallelism the layers of other stages are there as placeholders without weights.
    held = {i: layer for i, layer in enumerate(layers) if next(layer.parameters(), None) is not None}
    through_transformers = type(model).__module__.startswith("vllm.model_executor.models.transformers")
    return held, 1 if through_transformers else 0
