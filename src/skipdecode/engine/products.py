"""Matrix products of the size of a prompt on CPUs: how fast each engine multiplies bf16 and fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from skipdecode.common.stopwatch import timed
from skipdecode.engine.kernels import native_kernels
from skipdecode.engine.kernels.quantize import quantize
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.remembered import remembered

__all__ = ["PRODUCT_FLOPS", "cpu_products", "product_rates"]

_ROWS, _SIZE = 512, 1024
PRODUCT_FLOPS = 2 * _ROWS * _SIZE**2
_CPU, _KINDS, _ROUNDS = torch.device("cpu"), ("bfloat16", "float32"), 6


def cpu_products(arithmetic: str) -> dict[str, Callable[[], object]]:
    """A product of 512 rows in torch ("transformers") and, if they run here, in the kernels ("fast").

    `arithmetic` is the type of the factors: the name of a torch dtype, or "w8a8" for bytes, which stands for bf16 on a
    CPU that does not multiply bytes.
    """
    dtype = torch.bfloat16 if arithmetic == "w8a8" else getattr(torch, arithmetic)
    # Random numbers, like a model's: products of constants take less power and run a little faster.
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(_ROWS, _SIZE, generator=random), torch.randn(_SIZE, _SIZE, generator=random).to(dtype)
    work: dict[str, Callable[[], object]] = {"transformers": partial(torch.nn.functional.linear, x.to(dtype), weight)}
    kernels, _ = native_kernels(_CPU, dtype)
    if kernels is not None:
        in_bytes = arithmetic == "w8a8" and kernels.multiplies_bytes
        call = kernels.linear(LinearSpec(quantize(weight, "w8a8") if in_bytes else weight))
        work["fast"] = partial(call, x, torch.empty(_ROWS, _SIZE), _ROWS, False)
    return work


def product_rates(engine: str = "fast") -> dict[str, float]:
    """Operations per second of an engine's products on this CPU, by type: bfloat16 and float32.

    They are measured once, in turn, in less than a second. Without kernels, "fast" is torch.
    """
    return remembered("products", engine, _CPU, partial(_measured, engine), _rates)


def _measured(engine: str) -> dict[str, float]:
    products = {kind: cpu_products(kind) for kind in _KINDS}
    work = {kind: each.get(engine, each["transformers"]) for kind, each in products.items()}
    rounds = [{kind: timed(each) for kind, each in work.items()} for _ in range(_ROUNDS)]
    return {kind: PRODUCT_FLOPS / min(each[kind] for each in rounds) for kind in _KINDS}


def _rates(found: dict[str, float]) -> dict[str, float]:
    return {kind: float(found[kind]) for kind in _KINDS}
