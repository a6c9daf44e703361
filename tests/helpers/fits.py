"""Random fits for tests: maps large enough that leaving one out shows."""

from __future__ import annotations

import torch

from oracle import layer_list
from skipdecode.models.fit import Fit
from skipdecode.models.fit_maps import Bridge, PromptMap


def projections(model):
    """Key projections of the layers; None where a layer makes queries, keys and values in one product."""
    named = [dict(layer.named_modules()) for layer in layer_list(model)]
    return [next((m for path, m in modules.items() if path.endswith("k_proj")), None) for modules in named]


def random_fit(model, prompts=(), *, rank=4, taps=0, seed=0):
    """Bridges over all layers but the first and last, and maps of all layers for each prompt set."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape, size=0.3):
        return torch.randn(*shape, generator=random) * size

    width, layers = model.config.hidden_size, len(layer_list(model))
    bridges = {n: Bridge(draw(rank, width), draw(width, rank), draw(width)) for n in range(1, layers - 1)}
    keys = [None if p is None else p.weight.shape[0] for p in projections(model)]
    maps = {
        tuple(prompt): {
            n: PromptMap(draw(2 * keys[n], (taps + 1) * width), draw(2 * keys[n]), draw(2 * keys[n]))
            for n in range(layers)
            if n not in prompt
        }
        for prompt in prompts
    }
    return Fit(layers, width, bridges, maps, taps)
