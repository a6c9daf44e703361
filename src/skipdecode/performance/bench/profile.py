"""Where a decode step's time goes, of the engines that can be looked into: the package's own, and transformers.

Both are split alike: transformers' norms and activations count with the product that the fast engine fuses them into.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

from skipdecode.engine.dense_model import DenseModel
from skipdecode.engine.fast_model import NativeModel
from skipdecode.engine.kernels.spec import LayerSpec, StackInput
from skipdecode.models.families import decoder_layers
from skipdecode.performance.bench.peers import Peer
from skipdecode.performance.bench.peers.fast import EnginePeer
from skipdecode.performance.bench.peers.generate import TransformersPeer
from skipdecode.performance.bench.recorder import Part, Recorder
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.schedule import Schedule

__all__ = ["profile"]

# Of a layer in the C++ kernels, in the order in which they tell their times.
_PHASES = ("qkv", "append", "attention", "out", "mlp_in", "mlp_out")
_CACHE_CALLS = ("extend", "drop", "close")
_KINDS = {
    "embedding": ("embed_tokens", "embed_positions"),
    "qkv": ("input_layernorm", "self_attn_layer_norm", "q_proj", "k_proj", "v_proj"),
    "attention": ("q_norm", "k_norm", "rotary_emb", "self_attn"),
    "out": ("o_proj", "out_proj"),
    "mlp_in": ("post_attention_layernorm", "gate_proj", "up_proj", "fc1", "activation_fn"),
    "mlp_out": ("act_fn", "mlp", "down_proj", "fc2"),
    "head": ("norm", "lm_head"),
}
_MODULES = {module: kind for kind, modules in _KINDS.items() for module in modules}


def profile(peers: Sequence[Peer], workload: Workload, num_layers: int, bandwidth: float) -> dict[str, Any]:
    """Run every engine that can be looked into once under each schedule; those of other kinds are passed over.

    Returns
    -------
    dict
        ``rows``: one for each engine, batch, prompt length, nominal speed-up and kind of work, with its time a step
        and the share of `bandwidth` (bytes a second) that it reached; ``traceEvents``: Chrome's trace format.
    """
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    runs = 0
    for batch, prompt in workload.sizes:
        cached = batch * (prompt + workload.new / 2)  # tokens that a layer's attention reads
        for peer in peers:
            if not isinstance(peer, EnginePeer | TransformersPeer):
                continue
            peer.prepare(batch, prompt, workload.new)
            for nominal, schedule in workload.schedules(num_layers).items():
                if nominal > 1 and not peer.skips:
                    continue
                if isinstance(peer, EnginePeer):
                    recorder = _of_engine(peer, schedule, cached)
                else:
                    recorder = _of_transformers(peer, schedule, cached)
                runs += 1
                what = {"engine": peer.name, "batch": batch, "prompt": prompt, "nominal_speedup": nominal}
                rows += [what | row for row in recorder.table(bandwidth)]
                events += recorder.trace(runs, f"{peer.name}, batch {batch}, prompt {prompt}, nominal {nominal:g}x")
    return {"rows": rows, "traceEvents": events}


def _of_engine(peer: EnginePeer, schedule: Schedule, tokens: float) -> Recorder:
    fast = peer.fast
    schedule = peer.suited(schedule)
    if fast.captures_graphs:
        peer.step_seconds(schedule)
    engine = peer.start(schedule)
    recorder = Recorder(fast.device)
    calls: list[tuple[Any, str, Callable[..., Any]]] = [(engine, "_emit", recorder.timed("sampling", engine._emit))]
    if isinstance(fast, NativeModel):
        calls += [
            (fast, "_embed", recorder.timed("embedding", fast._embed)),
            (fast, "_stack", _noted_stack(fast, recorder, tokens * engine.kv.token_bytes)),
            (fast, "_head", recorder.timed("head", fast._head, num_bytes=fast._spec.head.weight.nbytes)),
        ]
    elif isinstance(fast, DenseModel):
        # A step of fixed shape is one call: nothing inside it can be timed.
        calls.append((fast, "_decode", recorder.timed("layer", fast._decode)))
    calls += [(engine.kv, name, recorder.timed("cache", getattr(engine.kv, name))) for name in _CACHE_CALLS]
    times = [time.perf_counter()]
    with recorder.replaced(calls):
        while engine.has_work:
            engine.step()
            times.append(time.perf_counter())
    recorder.add_steps(times)
    return recorder


def _noted_stack(fast: NativeModel, recorder: Recorder, cached: float) -> Callable[..., Any]:
    """The layers' call, whose kernels tell the time of their phases."""
    layers, stack = fast._spec.layers, fast._stack
    arguments = stack._args
    seconds = (ctypes.c_double * len(_PHASES))()
    ran: list[int] = []

    def run(given: StackInput) -> None:
        ctypes.memset(seconds, 0, ctypes.sizeof(seconds))
        ran[:] = [index for index, count in enumerate(given.counts) if count]
        arguments.seconds = ctypes.addressof(seconds)
        stack(given)
        arguments.seconds = None

    def parts() -> list[Part]:
        found = []
        for kind, took in zip(_PHASES, seconds, strict=True):
            weights = [cached if kind == "attention" else _weight_bytes(layers[i], kind) for i in ran]
            found.append(Part(kind, took, sum(weights), len(ran)))
        return found

    return recorder.timed("layer", run, parts=parts)


def _weight_bytes(layer: LayerSpec, kind: str) -> float:
    return 0.0 if kind == "append" else float(getattr(layer, kind).weight.nbytes)


def _of_transformers(peer: TransformersPeer, schedule: Schedule, tokens: float) -> Recorder:
    model = peer.model
    recorder = Recorder(model.device)
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    cached = tokens * geometry.kv_bytes_per_token()
    with peer.ready(schedule) as cache:
        calls = [(cache, "update", recorder.timed("append", cache.update))]
        for module, kind, layer in _parts(model):
            weight = getattr(module, "weight", None)
            reads = cached if kind == "attention" and layer is not None and weight is None else 0.0
            if weight is not None and kind != "embedding":
                reads = weight.nbytes
            calls.append((module, "forward", recorder.timed(kind, module.forward, layer, reads)))
        with recorder.replaced(calls):
            times = peer.generate(cache)
    recorder.add_steps(times)
    return recorder


def _parts(model: Any) -> list[tuple[Any, str, int | None]]:
    """The modules whose calls are timed, what kind of work they are, and their layer."""
    found: list[tuple[Any, str, int | None]] = []
    where = {module: index for index, layer in enumerate(decoder_layers(model)) for module in layer.modules()}
    layers = set(decoder_layers(model))
    for name, module in model.named_modules():
        last, layer = name.rpartition(".")[2], where.get(module)
        if last == "final_layer_norm":  # OPT has one in each layer, and one behind them
            kind: str | None = "head" if layer is None else "mlp_in"
        else:
            kind = "layer" if module in layers else _MODULES.get(last)
        if kind is not None:
            found.append((module, kind, layer))
    return found
