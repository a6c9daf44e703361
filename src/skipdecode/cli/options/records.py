"""Records to learn from, as `calibrate` and `prepare` read them until they call functions of Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skipdecode.data.examples import RecordOptions, encode_source, read_sources
from skipdecode.tuning.self_generated import own_answers

if TYPE_CHECKING:
    from skipdecode.data.prompts import Example, RecordFile
    from skipdecode.data.records import Template
    from skipdecode.data.source import PromptSource
    from skipdecode.models.loading.hub import LoadedModel

C = TypeVar("C", bound=Any)


def read_files(options: RecordOptions, template: Template, **limits: int | None) -> dict[str, RecordFile]:
    """`read_sources` of the files of flags."""
    sources = {flag: getattr(options, flag) for flag in limits}
    return read_sources(sources, template, limits, skip_bad=options.skips_bad)


def encode_file(
    options: RecordOptions, template: Template, loaded: LoadedModel, flag: str, file: RecordFile
) -> tuple[list[Example], int]:
    """`encode_source` of a flag's file."""
    return encode_source(file, f"--{flag}", template, loaded, options)


def with_self_generated(
    options: C, loaded: LoadedModel, source: PromptSource | None, held_out: int, **files: str
) -> tuple[C, Template, dict[str, Any]]:
    """The options with the model's own answers as records, the template, and the settings of the data."""
    out = Path(options.out)
    template, made = own_answers(loaded, options, options, source, out, seed=options.seed, held_out=held_out)
    # An answer may be a token longer when it is read again, and then exceed the context.
    paths: dict[str, Any] = {flag: str(out / name) for flag, name in files.items()}
    return replace(options, **paths, bad_records="skip"), template, made
