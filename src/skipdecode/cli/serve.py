"""OpenAI-compatible HTTP server for one model, with a schedule per request and a playground page.

The server has full depth, the checkpoint's own schedule (the default) and all schedules that the weights were tuned
under; --schedule adds more. Paths, fields, limits and metrics: docs/serve.md. It listens on
127.0.0.1 unless --host is given. After SIGTERM or Ctrl-C, running requests may finish for --drain-seconds. API keys are
read from --api-keys or from the environment variable SKIPDECODE_API_KEY (plain text, separated by commas).
Without keys, everybody who can reach the address can use the server.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skipdecode.cli.options import READS_SCHEDULE, ChatOptions, CheckpointRules, EngineOptions
from skipdecode.common.options import Reads, kinds, option, setting
from skipdecode.common.progress import note
from skipdecode.engine.rules import Rules
from skipdecode.errors import UsageError
from skipdecode.models.checkpoint_schedule import schedule_file
from skipdecode.models.loading.checkpoint import served_name
from skipdecode.serving.limits import Binding, ServerLimits

if TYPE_CHECKING:
    from skipdecode.serving.service import Service


@dataclass(frozen=True, kw_only=True)
class Config(Binding, ServerLimits, EngineOptions, ChatOptions, CheckpointRules, Rules):
    name: str | None = option("name of the model for clients (default: the last part of MODEL)", default=None)
    schedule: tuple[str, ...] = option(
        "schedules that requests can select (see below); :flat ones are faster in a server",
        default=(),
        parse=schedule_file,
        path=READS_SCHEDULE,
    )
    default: str | None = setting("schedule of requests that name none (default: the checkpoint's own)", default=None)
    seq_len: int = option("positions over which a nominal speed-up decreases the depth", default=128, least=1)
    template: bool = option(
        "apply the template that the checkpoint was tuned on to completions, unless a request disables it; "
        "--no-template: use texts unchanged",
        default=True,
    )
    api_keys: str | None = option("file with the SHA-256 of one API key per line", default=None, path=Reads())


def run(config: Config) -> int:
    """Run the server; returns 0 after a signal."""
    if config.prefix_per_key and not config.prefix_cache:
        raise UsageError("--prefix-per-key and --no-prefix-cache exclude each other: give one of them")
    from skipdecode.serving.middleware import ENVIRONMENT_VARIABLE, ApiKeys

    keys = ApiKeys.read(config.api_keys)
    if config.prefix_per_key and not keys:
        raise UsageError(f"--prefix-per-key needs API keys: give --api-keys, or set {ENVIRONMENT_VARIABLE}")
    from skipdecode.serving.server import open_socket, run_server  # imports torch

    # Before the model is loaded, which takes long.
    listening = open_socket(config)
    service = _service(config)
    if not keys and not config.is_local:
        note(
            f"no API key is set: everybody who can reach {config.host} can use the model (set --api-keys or the "
            f"environment variable {ENVIRONMENT_VARIABLE})"
        )
    shown = f"[{config.host}]" if ":" in config.host else config.host
    note(f"serving {service.model.name} on http://{shown}:{listening.getsockname()[1]}")
    logging.disable(logging.NOTSET)  # from here on, the server writes the log
    run_server(service, config, listening, keys)
    return 0


def _service(config: Config) -> Service:
    from skipdecode.engine.opening import open_engines
    from skipdecode.serving.service import open_service

    # Before the weights are loaded: what does not fit is refused.
    schedules = [config.checkpoint.parse(text, config.seq_len) for text in config.schedule]
    loaded = config.load()
    checkpoint = loaded.checkpoint
    tuned_under = tuple(schedule for schedule in checkpoint.tuned_under if not schedule.is_full)
    default = checkpoint.schedule if config.default is None else checkpoint.parse(config.default, config.seq_len)
    follows = config.generation_config
    backend = open_engines(loaded.model, config.engine, note, config.quantization, generation_config=follows)
    rules = {name: getattr(config, name) for name in kinds(Rules) if name in config.given}
    backend.sampling = replace(backend.sampling, **rules)
    service = open_service(
        loaded.model,
        loaded.tokenizer,
        name=config.name or served_name(config.model),
        checkpoint_schedule=default,
        others=(*tuned_under, *schedules),
        recipe=checkpoint.recipe,
        use_template=config.template,
        chat_template_kwargs=config.chat_template_kwargs,
        backend=backend,
        limits=config,
    )
    served = service.model
    which = " (the checkpoint's own)" if checkpoint.schedule is not None and config.default is None else ""
    note(f"schedules: {', '.join(served.schedules)}; default: {served.default}{which}")
    if (line := loaded.untuned_line(served.schedules.values())) is not None:
        note(line)
    elif not tuned_under:
        note(
            f"this model was not tuned under a schedule: `skipdecode plan {' '.join(config.words)}` finds a schedule "
            "for a speed-up, `skipdecode tune` tunes the model under it"
        )
    if served.use_template and served.template is not None:
        note(f"completions use the checkpoint's template {served.template.text!r} (--no-template disables it)")
    note(f"KV memory: at most {served.most_kv_bytes / 2**30:.2f} GiB ({config.max_rows} sequences)")
    return service
