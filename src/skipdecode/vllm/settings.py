"""The settings of the plugin: schedules by name, and when requests are admitted.

vLLM's processes exchange the settings as JSON in `VllmConfig.additional_config["skipdecode"]`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from skipdecode.common.jsonl import Json
from skipdecode.common.options import Options, check_name, option
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

KEY = "skipdecode"
"""The plugin's key in config.json, in `additional_config`, and in the extra arguments of a request."""
_FULL = "full"  # a schedule that is always loaded


@dataclass(frozen=True)
class PluginSettings(Options):
    """The settings of the plugin; the help text of a field documents it.

    `schedules`: the first schedule serves requests that name no schedule.

    Raises UsageError, ScheduleError if a value is out of range, a name is given twice, or the schedules are for
    different numbers of layers.
    """

    schedules: tuple[Schedule, ...]
    policy: Literal["continuous", "refill"] = option(
        "continuous: admit a request when a slot is free; refill: only if few requests run, or if all run near their "
        "least depth",
        default="continuous",
    )
    refill_below: float = option("refill: the share of the slots that counts as few", default=0.25, least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedules:
            raise ScheduleError("no schedule was given: put one into config.json, key 'skipdecode'")
        if twice := [name for name in self._names if self._names.count(name) > 1]:
            raise ScheduleError(f"schedule name {twice[0]!r} is given twice: give each schedule a name of its own")
        for schedule in self.schedules:
            schedule.check_fits(self.num_layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self.schedules[0].num_layers

    @property
    def skips(self) -> bool:
        """Whether any schedule skips a layer."""
        return not all(s.is_full for s in self.schedules)

    @cached_property
    def _names(self) -> list[str]:
        return [s.name for s in self.schedules]

    def index_of(self, request: Request | EngineCoreRequest) -> int:
        """The number of the schedule of a vLLM request, the default if it names none.

        Raises ScheduleError: with the names that are loaded.
        """
        arguments = (request.sampling_params and request.sampling_params.extra_args) or {}
        if "exact" in arguments:
            raise ScheduleError("exact is not vLLM's: skipdecode serve has it, and vLLM its speculative_config")
        name = arguments.get(KEY)
        if name is not None and name not in self._names:
            raise ScheduleError(f"unknown schedule {name!r}: this server has {', '.join(map(repr, self._names))}")
        return 0 if name is None else self._names.index(name)

    @classmethod
    def of_engine(cls, vllm_config: VllmConfig, config_value: object = None) -> Self | None:
        """The settings of an engine; None if it skips no layers. `config_value`: as in `from_config`."""
        extra = vllm_config.additional_config
        return cls.from_config(config_value, extra.get(KEY) if isinstance(extra, dict) else None)

    @classmethod
    def from_config(cls, config_value: object, options: object) -> Self | None:
        """Settings from the checkpoint's schedule and the user's options; None if neither has a schedule.

        `config_value`: `skipdecode` in the model's config. `options`: `skipdecode` in `additional_config`:
        fields of this class, `schedules` as a list of dictionaries.
        """
        if not isinstance(options, dict | None):
            raise UsageError(f"skipdecode: options are a JSON object, not {type(options).__name__}")
        options = dict(options or {})
        for name in options:
            check_name("option", name, [f.name for f in fields(PluginSettings)])
        schedules = [] if config_value is None else [Schedule.from_dict(config_value)]
        schedules += [Schedule.from_dict(data) for data in options.pop("schedules", ())]
        if not schedules:
            if options:
                raise ScheduleError(
                    f"skipdecode: {', '.join(options)} was given, but there is no schedule: put one into config.json, "
                    "key 'skipdecode', or pass it with --hf-overrides"
                )
            return None
        if all(s.name != _FULL for s in schedules):
            schedules.append(Schedule.full(schedules[0].num_layers))
        return cls(tuple(schedules), **options)

    def to_dict(self) -> Json:
        """A JSON-ready dictionary: options for `from_config`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"schedules": [s.to_dict() for s in self.schedules]}
