"""Where a decode step's time goes, of the engines that can be looked into: the package's own, and transformers.

Both are split alike: transformers' norms and activations count with the product that the fast engine fuses them into.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from transformers import Cache

from skipdecode.engine import sampling
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.kernels.spec import LayerSpec, StackInput
from skipdecode.models.families import decoder_layers
from skipdecode.performance.bench.peers import Peer, Rows, token_times
from skipdecode.performance.bench.peers.generate import TransformersPeer
from skipdecode.performance.bench.peers.own import FastPeer, GatedPeer
from skipdecode.performance.bench.recorder import Call, Part, Recorder, replaced
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
    found: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    runs = 0
    for batch, prompt in workload.sizes:
        rows = Rows(batch, prompt, workload.new)
        for peer in peers:
            if not isinstance(peer, FastPeer | GatedPeer | TransformersPeer):
                continue
            for nominal, schedule in workload.schedules(num_layers).items():
                if nominal > 1 and not peer.skips:
                    continue
                recorder = _recorded(peer, schedule, rows)
                runs += 1
                what = {"engine": peer.name, "batch": batch, "prompt": prompt, "nominal_speedup": nominal}
                found += [what | row for row in recorder.table(bandwidth)]
                events += recorder.trace(runs, f"{peer.name}, batch {batch}, prompt {prompt}, nominal {nominal:g}x")
    return {"rows": found, "traceEvents": events}


def _recorded(peer: Peer, schedule: Schedule, rows: Rows) -> Recorder:
    """The calls of one run."""
    if peer.warms:
        peer.run(schedule, rows)
    engine, recorder = peer.engine(schedule, rows), Recorder(peer.model.device)
    tokens = rows.batch * (rows.prompt + rows.new / 2)  # that a layer's attention reads
    calls = _of_fast(engine, recorder, tokens) if isinstance(engine, FastEngine) else _of_model(peer, recorder, tokens)
    calls.append((sampling, "choose", recorder.timed("sampling", sampling.choose)))
    with peer.made_up(engine), replaced(calls):
        recorder.add_steps(token_times(engine, peer.requests(rows)))
    return recorder


def _of_fast(engine: FastEngine, recorder: Recorder, tokens: float) -> list[Call]:
    model = engine.model
    calls: list[Call] = [
        (model, "_embed", recorder.timed("embedding", model._embed)),
        (model, "_stack", _noted_stack(model, recorder, tokens * engine.kv.token_bytes)),
        (model, "_head", recorder.timed("head", model._head, num_bytes=model.head.bytes_read(1))),
    ]
    return calls + [(engine.kv, name, recorder.timed("cache", getattr(engine.kv, name))) for name in _CACHE_CALLS]


def _noted_stack(model: FastModel, recorder: Recorder, cached: float) -> Callable[..., Any]:
    """The layers' call, whose kernels tell the time of their phases."""
    layers, stack = model._spec.layers, model._stack
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


def _of_model(peer: Peer, recorder: Recorder, tokens: float) -> list[Call]:
    model = peer.model
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    cached = tokens * geometry.kv_bytes_per_token()
    calls: list[Call] = [(Cache, "update", recorder.timed("append", Cache.update))]
    for module, kind, layer in _parts(model):
        weight = getattr(module, "weight", None)
        reads = cached if kind == "attention" and layer is not None and weight is None else 0.0
        if weight is not None and kind != "embedding":
            reads = weight.nbytes
        calls.append((module, "forward", recorder.timed(kind, module.forward, layer, reads)))
    return calls


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
