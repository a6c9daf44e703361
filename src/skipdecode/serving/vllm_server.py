"""vLLM's own server with this package's plugin, as a command line."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence

from skipdecode.errors import MissingExtraError
from skipdecode.schedule import Schedule
from skipdecode.vllm.settings import KEY

__all__ = ["vllm_command"]


def vllm_command(
    model: str, *, name: str, host: str, port: int, dtype: str, schedules: Sequence[Schedule]
) -> list[str]:
    """What to run; the plugin is found by vLLM itself.

    Parameters
    ----------
    model : str
        A directory or a hub id; no adapter.
    name : str
        The model's name as clients see it.
    schedules : sequence of Schedule
        Schedules beside the checkpoint's own.

    Raises
    ------
    MissingExtraError
        vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("--engine vllm", "vllm")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", name, "--host", host, "--port", str(port), "--dtype", dtype]
    if schedules:
        settings = {KEY: {"schedules": [schedule.to_dict() for schedule in schedules]}}
        command += ["--additional-config", json.dumps(settings)]
    return command
