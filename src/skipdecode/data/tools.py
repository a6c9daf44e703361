"""Tools that a model may call in a request of OpenAI's, and those of which one has to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.errors import OptionError

Tool = Mapping[str, Any]
_ACCEPTED = (
    'none, auto, required, {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}, with names of `tools`'
)


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the chat template sees, those that may be called, and whether one has to be.

    `several`: whether there may be several calls.
    """

    shown: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    demanded: bool = False
    several: bool = True

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: Any = "auto", *, several: bool = True) -> ToolChoice:
        """What OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` say together.

        Raises OptionError: the choice is not accepted, or names no tool.
        """
        mode, names = _read(choice)
        if mode == "none":
            return cls()
        found = tuple(tool for tool in tools if isinstance(name := name_of(tool), str) and name in (names or {name}))
        demanded = mode == "required"
        if len({*map(name_of, found)}) < len(names or []) or (demanded and not found):
            raise OptionError("tool_choice", choice, _ACCEPTED)
        one = isinstance(choice, Mapping) and choice["type"] == "function"
        return cls(tuple(tools), found, demanded, several and not one)


def _read(choice: Any) -> tuple[str, set[str] | None]:
    """The mode, and the names of the tools that may be called; None for all."""
    match choice:
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", {name}
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*named]}}:
            names = [name_of(one) for one in named if isinstance(one, Mapping)]
            if len(names) == len(named) > 0 and all(isinstance(name, str) for name in names):
                return mode, set(names)
    raise OptionError("tool_choice", choice, _ACCEPTED)


def name_of(tool: Tool) -> Any:
    """The name of a tool, which OpenAI's form has within `function`."""
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None
