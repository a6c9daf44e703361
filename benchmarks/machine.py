"""The limit of a decode step: its bytes and operations, and the rates of this machine for both."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from ctypes import c_int64 as _size
from ctypes import c_void_p as _pointer
from functools import partial
from typing import Any

import torch

from skipdecode.cost.geometry import ModelGeometry
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.kernels.head import MOST_ROWS
from skipdecode.engine.kernels.library import KernelBuildError, load_library
from skipdecode.engine.kernels.native import native_kernels
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.kernels.weights import quantize
from skipdecode.models.families import decoder_layers

# Several times the largest last-level cache, and small enough for any machine that holds a model.
_READ_BYTES = {"cpu": 2**29, "cuda": 2**31}
_REPEATS = 3
_ROWS, _SIZE = 512, 1024
_PRODUCT_FLOPS = 2 * _ROWS * _SIZE**2
_CPU = torch.device("cpu")


def measure_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes per second of a large read on all threads: the best of a few over half a GiB (on a GPU 2 GiB).

    Reads are sums and, on a CPU with a compiler, a C++ loop that only reads: sums alone do not reach the bandwidth of
    the memory. On a GPU also a copy of one half to the other, which counts bytes read and written.
    """
    device = torch.device(device)
    block = torch.ones(_READ_BYTES.get(device.type, 2**29) // 4, device=device)
    reads: list[Callable[[], object]] = [block.sum, lambda: torch.dot(block, block)]
    if device.type == "cpu":
        with contextlib.suppress(KernelBuildError):
            reads.append(partial(load_library().skipdecode_read, _pointer(block.data_ptr()), _size(block.nbytes)))
    else:
        target, source = block.chunk(2)
        reads.append(partial(target.copy_, source))
    return block.nbytes / min(_best_seconds(read, device) for read in reads)


def measure_flops(dtype: torch.dtype, device: torch.device | str) -> float:
    """Operations per second of a GPU's matrix product in `dtype`: the best of a few, each compute bound."""
    device, size = torch.device(device), 4096
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def measure_products(arithmetic: str, device: torch.device | str = "cpu") -> float:
    """Operations per second of a product of 512 rows: the arithmetic limit of a prompt or a large batch.

    On a CPU the faster of torch and the kernels of this package. `arithmetic` is as for `cpu_products`.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return measure_flops(torch.bfloat16 if arithmetic == "w8a8" else getattr(torch, arithmetic), device)
    return _PRODUCT_FLOPS / min(_best_seconds(each, device) for each in cpu_products(arithmetic).values())


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
    native, _ = native_kernels(_CPU, dtype)
    if native is not None:
        in_bytes = arithmetic == "w8a8" and native.multiplies_bytes
        call = native.linear(LinearSpec(quantize(weight, "w8a8") if in_bytes else weight))
        work["fast"] = partial(call, x, torch.empty(_ROWS, _SIZE), _ROWS, False)
    return work


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; does nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = math.inf
    for attempt in range(_REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if attempt:  # The first one warms up.
            best = min(best, time.perf_counter() - start)
    return best


def step_bytes(model: Any, geometry: ModelGeometry, batch: int) -> tuple[float, float, float]:
    """Bytes that a decode step of `batch` sequences reads: at any depth, of each layer, of a cached token in a layer.

    In a mixture of experts a step is taken to read the experts of one token.
    """
    fixed, size = head_params(model) + batch * geometry.hidden_size, geometry.dtype_bytes
    keys = sum(geometry.keys) / max(1, sum(map(bool, geometry.keys)))
    return fixed * size, geometry.layer_params * size, keys * size


def held_bytes(fast: FastModel, batch: int) -> tuple[float, float, float]:
    """Likewise of a greedy step of the fast engine, by the weights as it holds them."""
    spec, short = fast.spec, fast.head.short if batch <= MOST_ROWS else None
    layers = sum(linear.nbytes for x in spec.layers for linear in (x.qkv, x.out, x.mlp_in, x.mlp_out))
    fixed, kv = (short or spec.head).nbytes + batch * spec.embedding[0].nbytes, fast.new_kv().layout
    return fixed, layers / fast.num_layers, kv.page_bytes / kv.page_tokens


def step_flops(model: Any, geometry: ModelGeometry, batch: int) -> tuple[float, float, float]:
    """Operations of a decode step, likewise."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4.0 * config.num_attention_heads * head_dim
    return 2.0 * batch * head_params(model), 2.0 * batch * geometry.layer_params, attention


def head_params(model: Any) -> int:
    """Weights outside the layers that every token reads, without embeddings that are looked up."""
    left_out = {*decoder_layers(model).parameters()}
    for module in model.modules():
        left_out |= {*module.parameters()} if isinstance(module, torch.nn.Embedding) else set()
    read = {*model.parameters()} - left_out | {*model.get_output_embeddings().parameters()}
    return sum(p.numel() for p in read)
