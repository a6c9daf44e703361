"""An OpenAI-compatible server for one model, with a schedule per request and a page to try it.

It offers full depth, the checkpoint's own schedule (the default) and all others that the weights were tuned under;
--schedule and --nominal-speedup add more. Paths, fields, limits and metrics: docs/serve.md. It listens on 127.0.0.1
unless --host is given. SIGTERM and Ctrl-C let the running requests end, for --drain-seconds at most. API keys come
from --api-keys or from the environment variable SKIPDECODE_API_KEY (in plain, with commas between them); without any,
everybody who reaches the address is served.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.cli.options import EngineOptions
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.engine.base import ENGINES
from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.models.carried import schedule_file
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import PROMPT_SETS, prompt_set
from skipdecode.serving.limits import Binding, ServerLimits

if TYPE_CHECKING:
    from skipdecode.engine.router import Router
    from skipdecode.serving.service import Service

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(Binding, ServerLimits, EngineOptions):
    """Options of `skipdecode serve`."""

    name: str | None = option("of the model for clients (default: the last part of MODEL)", default=None)
    schedule: tuple[str, ...] = option(
        "schedule files (JSON), or names of bundled ones, that requests may name",
        default=(),
        parse=schedule_file,
        path=Reads(),
    )
    nominal_speedup: tuple[float, ...] = option(
        "also the paper's schedules for these ratios of all layers to the mean layers run", default=(), least=1
    )
    seq_len: int = option("positions over which --nominal-speedup lowers the depth", default=128, least=1)
    flat: bool = option(
        "--nominal-speedup with the same depth at every position, which gains most when requests of different ages "
        "run together",
        default=False,
    )
    prompt_layers: str | None = option(
        f"layers that prompts run under --schedule and --nominal-speedup, whatever those say: {PROMPT_SETS}",
        default=None,
    )
    engine: str = option(
        "fast: the package's own engine (CPUs; `info` lists its model types); auto: fast where it "
        "covers the model, else transformers; vllm: start vLLM's own server with the plugin instead",
        default="auto",
        choices=(*ENGINES, "vllm"),
    )
    template: bool = option(
        "put a completion's text into the template that the checkpoint was tuned on, unless a request says otherwise; "
        "--no-template leaves it as it is",
        default=True,
    )
    router: str | None = option(
        "file of skipdecode calibrate --router: its schedules are offered too, and it chooses among them for requests "
        "that ask for the schedule routed",
        default=None,
        path=Reads(),
    )
    api_keys: str | None = option("file with the SHA-256 of an API key on each line", default=None, path=Reads())


def run(config: Config) -> int:
    """Serve; returns 0 after a signal."""
    schedules = _checked(config)
    if config.engine == "vllm":
        return _run_vllm(config, schedules)
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("skipdecode serve", "serve")
    from skipdecode.serving.middleware import ENVIRONMENT_VARIABLE, ApiKeys
    from skipdecode.serving.server import is_loopback, open_socket, run_server

    keys = ApiKeys.read(config.api_keys)
    if config.prefix_per_key and not keys:
        raise UsageError(f"--prefix-per-key needs API keys: give --api-keys, or set {ENVIRONMENT_VARIABLE}")
    # Before the model, which takes a while to load.
    listening = open_socket(config)
    service = _service(config, schedules)
    if not keys and not is_loopback(config.host):
        note(
            f"no API key is set: everybody who reaches {config.host} can use the model (--api-keys, or the environment "
            f"variable {ENVIRONMENT_VARIABLE})"
        )
    shown = f"[{config.host}]" if ":" in config.host else config.host
    note(f"serving {service.name} on http://{shown}:{listening.getsockname()[1]}")
    logging.disable(logging.NOTSET)  # from here on the log is ours
    run_server(service, config, listening, keys)
    return 0


def _checked(config: Config) -> list[Schedule]:
    """The schedules that the options name, refused before weights are loaded."""
    if config.prefix_per_key and not config.prefix_cache:
        raise UsageError(
            "--prefix-per-key and --no-prefix-cache: without a prefix cache nothing is kept; give one of them"
        )
    if config.flat and not config.nominal_speedup:
        raise UsageError("--flat belongs to --nominal-speedup: give both, or neither")
    if config.prompt_layers is not None and not (config.schedule or config.nominal_speedup):
        raise UsageError("--prompt-layers belongs to --schedule or --nominal-speedup: the checkpoint's own stays as is")
    found = [Schedule.load(path) for path in config.schedule]
    for speedup in config.nominal_speedup:
        schedule = Schedule.from_speedup(config.ref.num_layers, speedup, config.seq_len)
        found.append(schedule.flattened() if config.flat else schedule)
    text, router = config.prompt_layers, _router(config)
    found = found if text is None else [s.with_prompt(prompt_set(text, s.num_layers)) for s in found]
    found += [] if router is None else router.schedules
    for schedule in found:
        schedule.check_fits(config.ref.num_layers)
    return found


def _router(config: Config) -> Router | None:
    if config.router is None:
        return None
    from skipdecode.engine.router import Router

    return Router.load(Path(config.router))


def _name(config: Config) -> str:
    return config.name or Path(config.model).name or config.model


def _service(config: Config, schedules: list[Schedule]) -> Service:
    from skipdecode.serving.service import open_service

    loaded = config.load()
    tuned_under = () if loaded.recipe is None else loaded.recipe.tuned_under
    tuned_under = tuple(schedule for schedule in tuned_under if schedule.dropped)
    service = open_service(
        loaded.model,
        loaded.tokenizer,
        name=_name(config),
        carried=loaded.schedule,
        others=(*tuned_under, *schedules),
        recipe=loaded.recipe,
        use_template=config.template,
        engine=config.engine,
        quantization=config.quantization,
        limits=config,
        note=note,
    )
    catalog = service.catalog
    if (router := _router(config)) is not None:
        catalog.route = router.bind(loaded.model)
    own = " (the checkpoint's own)" if loaded.schedule is not None else ""
    note(f"schedules: {', '.join(catalog.loaded)}; default: {catalog.default}{own}")
    if (line := loaded.untuned_line(catalog.loaded.values())) is not None:
        note(line)
    elif not tuned_under:
        note(
            f"this model was tuned under no schedule: `skipdecode plan {config.model}` finds one for the speed-up that "
            "you want, `skipdecode tune` makes the model hold under it"
        )
    if service.template is not None and service.template.used:
        note(f"completions go into the checkpoint's template {service.template.prompt!r} (--no-template)")
    note(f"keys and values take {service.kv_bytes_most / 2**30:.2f} GiB at most ({config.max_rows} rows)")
    return service


def _run_vllm(config: Config, schedules: list[Schedule]) -> int:
    from skipdecode.vllm.projection import check_projects
    from skipdecode.vllm.settings import server_command

    if config.quantization != "none":
        raise UsageError("--quantization is not for --engine vllm, which reads the checkpoint's own")
    if config.router is not None:
        raise UsageError("--router is not for --engine vllm, whose requests name their schedules")
    if config.api_keys is not None:
        raise UsageError("--api-keys is not for --engine vllm, which takes its key from the variable VLLM_API_KEY")
    if config.prefix_per_key:
        raise UsageError("--prefix-per-key is not for --engine vllm, where a request's cache_salt does that")
    if config.cors:
        raise UsageError("--cors is not for --engine vllm, which lets pages of any origin in by itself")
    ref = config.ref
    if ref.adapter is not None:
        raise UsageError(f"--engine vllm takes whole checkpoints, {config.model} is an adapter: merge it first")
    architecture = (ref.config.architectures or [""])[0]
    quantization = getattr(ref.config, "quantization_config", None)
    check_projects(schedules if ref.schedule is None else (ref.schedule, *schedules), architecture, quantization)
    if schedules and ref.schedule is None:
        # The plugin's default is the first; here, as with the other engines, it is the checkpoint's own or full depth.
        schedules.insert(0, Schedule.full(ref.num_layers))
    command = server_command(
        ref.place.where,
        name=_name(config),
        host=config.host,
        port=config.port,
        dtype=config.dtype,
        schedules=schedules,
    )
    recipe = ref.recipe
    if config.template and recipe is not None and recipe.prompt_template is not None:
        note(f"vLLM takes completions as they are: send them in the form {recipe.prompt_template!r}")
    sys.stdout.flush()
    # In this process's place, so that signals reach vLLM itself.
    os.execv(command[0], command)
