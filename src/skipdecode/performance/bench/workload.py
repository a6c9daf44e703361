"""The workload of a benchmark: engines, model sizes, batches, lengths, nominal speed-ups. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipdecode.common.options import Options, option
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import PROMPT_SETS, prompt_set

ENGINES = ("fast", "fast-int8", "fast-int4", "fast-w8a8", "transformers", "transformers-static", "gated")
"""Names of the backends that can be measured."""

GEOMETRIES: dict[str, dict[str, Any]] = {
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 2048,
    },
    "opt-6.7b": {
        "model_type": "opt",
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 4096,
    },
    "opt-125m": {"model_type": "opt"},
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
"""Sizes of real models, for measurements with random weights: the time of a step does not depend on the weights."""


@dataclass(frozen=True)
class Workload(Options):
    """Sequences that start together and get `new` tokens each, in `new` - 1 decode steps.

    `prompt` is the number of cached tokens of a sequence when its first new token is fed back.
    """

    batches: tuple[int, ...] = option("sequences decoded together, one or more values", default=(1, 8), least=1)
    prompt: tuple[int, ...] = option("prompt tokens of a sequence, one or more values", default=(64,), least=2)
    new: int = option("new tokens of a sequence", default=128, least=3)
    nominal: tuple[float, ...] = option(
        "nominal speed-ups; 1, full depth, is always run", default=(1.0, 2.0, 3.0, 5.0), least=1
    )
    rounds: int = option("rounds; in each, everything runs once, in turn", default=3, least=1)
    prompts: bool = option("also time prompts, for the speed-up of whole requests", default=True)
    prompt_layers: str | None = option(
        f"layers that prompts run under the nominal speed-ups: {PROMPT_SETS} (default: full)", default=None
    )

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Sequences and prompt tokens of each cell of the table."""
        return [(batch, prompt) for batch in dict.fromkeys(self.batches) for prompt in dict.fromkeys(self.prompt)]

    @property
    def steps(self) -> int:
        """Decode steps."""
        return self.new - 1

    def schedules(self, num_layers: int) -> dict[float, Schedule]:
        """The paper's schedule for each nominal speed-up, full depth first; ScheduleError if layers do not fit."""
        prompt = prompt_set(self.prompt_layers or "full", num_layers)
        return {1.0: Schedule.full(num_layers)} | {
            n: Schedule.from_speedup(num_layers, n, self.steps).with_prompt(prompt)
            for n in sorted(set(self.nominal))
            if n > 1
        }


def build(geometry: str, dtype: Any, device: Any = "cpu") -> Any:
    """A causal LM of one of `GEOMETRIES` with random weights, created on the device, in eval mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(GEOMETRIES[geometry])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
