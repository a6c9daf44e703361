"""One check of the tensors that were loaded, of a model and of an adapter: names, shapes and finite values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from skipdecode.errors import ModelLoadError

__all__ = ["check_tensors"]

_NAMED = 2


def check_tensors(
    where: str,
    tensors: Iterable[tuple[str, Any]],
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]] = (),
) -> None:
    """Refuse weights that are not what the model computes with.

    Parameters
    ----------
    where : str
        The directory or hub id of the weights.
    tensors : iterable of (name, tensor)
        The loaded tensors; checked for values that are not finite.
    missing, unexpected : collection of str
        Tensors that the model has and the file has not, and the reverse: a config with fewer layers, or other names.
    mismatched : collection of (name, shape in the file, shape in the model)

    Raises
    ------
    ModelLoadError
        Names the first tensors of each fault.
    """
    shapes = {
        name: f"{name} ({tuple(stored)} in the file, {tuple(own)} in the model)" for name, stored, own in mismatched
    }
    faults = {
        "are missing": sorted(missing),
        "are not in the model": sorted(unexpected),
        "have another shape": [shapes[name] for name in sorted(shapes)],
    }
    remedy = "give it the config that these weights were saved with, or fetch it again"
    if not any(faults.values()):
        faults = {"are not finite": sorted(name for name, tensor in tensors if not _is_finite(tensor))}
        remedy = "fetch it again, or tune anew with a lower --learning-rate"
    told = [f"{len(n)} weights {fault}, such as {', '.join(n[:_NAMED])}" for fault, n in faults.items() if n]
    if told:
        raise ModelLoadError(f"{where}: {'; '.join(told)}: {remedy}")


def _is_finite(tensor: Any) -> bool:
    """One pass without a copy; the exact test is for sums that a half-precision type cannot hold."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() < 2:
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
