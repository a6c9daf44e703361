"""What the plugin was told: schedules by name, how rows are skipped, who is admitted when. Pure Python.

Travels between vLLM's processes as JSON in `VllmConfig.additional_config["skipdecode"]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from skipdecode.errors import ScheduleError, UsageError
from skipdecode.schedule import Schedule

__all__ = ["KEY", "Mode", "PluginSettings"]

KEY = "skipdecode"
"""Names our part of config.json, of `additional_config`, and of a request's extra arguments."""
_FULL = "full"  # the schedule that is always there

Mode = Literal["auto", "nested", "where"]
Policy = Literal["continuous", "waves"]
_FIELDS = ("schedules", "mode", "policy", "join_below", "machine")


@dataclass(frozen=True)
class PluginSettings:
    """The plugin's settings.

    Parameters
    ----------
    schedules : tuple of Schedule
        By their names; the first is what a request gets that asks for none.
    mode : {"auto", "nested", "where"}
        Whether a layer computes only the rows that need it, or all of them and puts the others back; "auto" asks the
        cost model in every step.
    policy : {"continuous", "waves"}
        Admit whenever there is room, or only while few requests run or all are near their least depth.
    join_below : float
        Waves: admit while no more than this share of the slots is running.
    machine : (float, float), optional
        Bytes and operations a second for the cost model; measured at start where they are not given.

    Raises
    ------
    UsageError, ScheduleError
        If a value is out of range, a name is given twice, or the schedules are for different numbers of layers.
    """

    schedules: tuple[Schedule, ...]
    mode: Mode = "auto"
    policy: Policy = "continuous"
    join_below: float = 0.25
    machine: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.schedules:
            raise ScheduleError("no schedule was given: put one into config.json, key 'skipdecode'")
        names = [s.name for s in self.schedules]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ScheduleError(f"schedule name {twice[0]!r} is given twice: give each schedule a name of its own")
        for field, choices in (("mode", get_args(Mode)), ("policy", get_args(Policy))):
            if getattr(self, field) not in choices:
                raise UsageError(
                    f"skipdecode: {field}={getattr(self, field)!r} is not accepted: give one of {', '.join(choices)}"
                )
        if not isinstance(self.join_below, int | float) or not 0 <= self.join_below <= 1:
            raise UsageError(f"skipdecode: join_below={self.join_below!r} is not accepted: give a number from 0 to 1")
        for schedule in self.schedules:
            schedule.check_fits(self.schedules[0].num_layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self.schedules[0].num_layers

    @property
    def skips(self) -> bool:
        """Whether any schedule leaves out a layer."""
        return not all(s.is_full for s in self.schedules)

    def index(self, name: object) -> int:
        """The number of the schedule of that name (None: the default).

        Raises
        ------
        ScheduleError
            With the names that are loaded.
        """
        if name is None:
            return 0
        for number, schedule in enumerate(self.schedules):
            if schedule.name == name:
                return number
        raise ScheduleError(
            f"unknown schedule {name!r}: this server has {', '.join(repr(s.name) for s in self.schedules)}"
        )

    def index_of(self, request: Any) -> int:
        """The number of the schedule that one of vLLM's requests asks for; raises as `index` does."""
        parameters = request.sampling_params
        return self.index(((parameters and parameters.extra_args) or {}).get(KEY))

    @classmethod
    def of_engine(cls, vllm_config: Any) -> Self | None:
        """The settings that an engine was started with; None for one that does not skip."""
        extra = vllm_config.additional_config
        return cls.from_config(None, extra[KEY]) if isinstance(extra, dict) and KEY in extra else None

    @classmethod
    def from_config(cls, carried: Any, options: Any) -> Self | None:
        """Settings from the checkpoint's schedule and the user's options, either of which may be missing.

        Parameters
        ----------
        carried : dict or None
            Value of `skipdecode` in the model's config.
        options : dict or None
            Value of `skipdecode` in `additional_config`: fields of this class, `schedules` as a list of dictionaries.

        Returns
        -------
        Settings or None
            None where there is no schedule.
        """
        options = _known({} if options is None else options)
        schedules = [] if carried is None else [Schedule.from_dict(carried)]
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
        if options.get("machine") is not None:
            options["machine"] = tuple(options["machine"])
        return cls(tuple(schedules), **options)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: options for `from_config`."""
        values = {name: getattr(self, name) for name in _FIELDS[1:]}
        return {"schedules": [s.to_dict() for s in self.schedules]} | values


def _known(options: Any) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise UsageError(f"skipdecode: options are a JSON object, not {type(options).__name__}")
    if unknown := sorted(set(options) - set(_FIELDS)):
        raise UsageError(f"skipdecode: unknown option {unknown[0]!r}: accepted are {', '.join(_FIELDS)}")
    return dict(options)
