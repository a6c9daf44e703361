"""What is measured against each other: one small class an engine, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skipdecode.errors import UsageError
from skipdecode.performance.bench.gguf_file import KINDS

if TYPE_CHECKING:
    from skipdecode.performance.bench.peers.base import Peer

__all__ = ["DRAFTING", "PEERS", "make_peer"]

_QUANTIZED = ("fast-int8", "fast-int4")
DRAFTING = ("early-exit", "prompt-lookup")
PEERS = (
    "fast",
    *_QUANTIZED,
    "transformers",
    "transformers-static",
    "gated",
    *DRAFTING,
    *(f"llama.cpp-{kind}" for kind in KINDS),
    "vllm",
)


def make_peer(name: str, model: Any, *, text: list[int] | None = None, exit_layer: int | None = None) -> Peer:
    """A peer by name.

    Parameters
    ----------
    name : str
        One of `PEERS`.
    model : transformers causal LM
    text : list of int, optional
        Tokens of a real text, which the drafting peers continue.
    exit_layer : int, optional
        Layers that draft in "early-exit". Default: a quarter of them.

    Raises
    ------
    UsageError
        For a name that is not known or does not cover the model, and for a drafting peer without a text.
    MissingExtraError
        If the peer's library is absent.
    """
    if name not in PEERS:
        raise UsageError(f"engine {name!r} is not known: accepted are {', '.join(PEERS)}")
    if name in DRAFTING and not text:
        raise UsageError(
            f"the engine {name!r} gains by guessing a text, which random weights do not have: give a model with a "
            "tokenizer, or leave it out of --engines"
        )
    return _maker(name, text or [], exit_layer)(model)


def _maker(name: str, text: list[int], exit_layer: int | None) -> Callable[[Any], Peer]:
    # Each engine's libraries are imported only when it is asked for.
    if name == "fast" or name in _QUANTIZED:
        from skipdecode.performance.bench.peers.fast import EnginePeer

        kind: Any = name.partition("-")[2] or None
        return lambda model: EnginePeer(model, quantization=kind)
    if name in DRAFTING:
        from skipdecode.performance.bench.peers.drafting import EarlyExitPeer, PromptLookupPeer

        if name == "prompt-lookup":
            return lambda model: PromptLookupPeer(model, text)
        return lambda model: EarlyExitPeer(model, text, exit_layer or max(1, model.config.num_hidden_layers // 4))
    if name.startswith("llama.cpp-"):
        from skipdecode.performance.bench.peers.llama_cpp import LlamaCppPeer

        return lambda model: LlamaCppPeer(model, name.removeprefix("llama.cpp-"))
    if name == "vllm":
        from skipdecode.performance.bench.peers.vllm import VllmPeer

        return VllmPeer
    from skipdecode.performance.bench.peers.generate import GatedPeer, StaticPeer, TransformersPeer

    return {kind.name: kind for kind in (TransformersPeer, StaticPeer, GatedPeer)}[name]
