"""The installed releases: how transformers names the argument of a KV cache, and which versions were tested.

transformers 5.24 renames ``past_key_values`` of models, layers, attention, outputs and ``generate`` to ``cache``.
Layers of some families call it ``layer_past`` in all releases. Other modules ask this one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from skipdecode.common.environment import package_version
from skipdecode.common.types import PreTrainedModel
from skipdecode.errors import UnsupportedFeatureError, UntestedVersionWarning

Arguments = dict[str, Any]
"""Arguments of a call by name."""
Forward = Callable[..., Any]
"""The forward of a model or a layer."""
_CACHE_NAMES = ("cache", "past_key_values", "layer_past", "cache_params")


@functools.cache
def cache_name(forward: Forward) -> str:
    """The name of the argument with which a model's or a layer's `forward` takes a KV cache.

    Raises UnsupportedFeatureError if no argument has a known name.
    """
    named = inspect.signature(forward).parameters
    accepted = next((name for name in _CACHE_NAMES if name in named), None)
    if accepted is None:
        raise UnsupportedFeatureError(
            f"{forward.__qualname__} takes no KV cache under a known name ({', '.join(_CACHE_NAMES)}): this release of "
            f"transformers is not known here; {_advice('transformers')}"
        )
    return accepted


def model_cache_name(model: PreTrainedModel) -> str:
    """The name of the KV cache in the arguments and outputs of a model, and in its `generate`."""
    return cache_name(type(model).forward)


def renamed_cache(call: Arguments, name: str) -> Arguments:
    """Arguments by name in which the KV cache has this name, whichever release's name the caller used.

    Raises TypeError if the cache is given under two names.
    """
    named = [other for other in _CACHE_NAMES if call.get(other) is not None]
    if len(named) > 1:
        raise TypeError(f"{' and '.join(named)} are the same argument: give one of them")
    rest = {key: value for key, value in call.items() if key not in _CACHE_NAMES}
    return rest | {name: call[named[0]]} if named else rest


def before(release: str) -> bool:
    """Whether the installed transformers is older than a release, such as "5.24"."""
    return Version(package_version("transformers") or "0") < Version(release)


def warn_if_untested() -> None:
    """Warn once for each installed package whose version is outside the range that was tested.

    Warns UntestedVersionWarning: one sentence: the package, its version, the tested versions, and what to install.
    """
    for requirement in _requirements():
        version = package_version(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            warnings.warn(
                f"{requirement.name} {version} was not tested with this version of skipdecode, so results may be "
                f"wrong: {_advice(requirement.name)}",
                UntestedVersionWarning,
                stacklevel=2,
            )


@functools.cache
def _requirements() -> tuple[Requirement, ...]:
    """Requirements of this package up to a tested release, by its metadata; none where it was not installed."""
    try:
        listed = importlib.metadata.requires("skipdecode") or ()
    except importlib.metadata.PackageNotFoundError:
        return ()
    bounded = [r for r in map(Requirement, listed) if any(part.operator == "<" for part in r.specifier)]
    return tuple({requirement.name: requirement for requirement in bounded}.values())


def _advice(package: str) -> str:
    tested = next((str(requirement) for requirement in _requirements() if requirement.name == package), package)
    return f"pip install '{tested.partition(';')[0].strip()}'"
