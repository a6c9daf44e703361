"""An evaluation without references: schedules against a base model, on texts for prompts.

On the base model's texts: KL divergence and agreement of the next token. On the texts of each schedule for the same
prompts: the base model's perplexity, next to the perplexity of its own texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from skipdecode.common.bootstrap import compare, interval, ratio_of_sums
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import heading
from skipdecode.common.progress import note, progress_bar
from skipdecode.common.rows import read_rows
from skipdecode.common.tables import figures
from skipdecode.data.prompts import context_length, prompt_room
from skipdecode.data.records import Record
from skipdecode.data.source import PromptSource, Records
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.opening import end_tokens
from skipdecode.engine.requests import Sampling, row_seed
from skipdecode.evaluation.method_runs import generate_all, measured_speeds, with_w8a8
from skipdecode.evaluation.results import (
    OUTPUTS_FILE,
    EvaluationOptions,
    EvaluationSettings,
    Run,
    model_about,
    save_run,
    unfinished_log,
)
from skipdecode.evaluation.run import encode_prompts, note_left_out
from skipdecode.evaluation.scores import measure_in_batches, ratio_score, text_scores, token_fidelity, token_sums
from skipdecode.generation.llm import LLM
from skipdecode.generation.self_generated import (
    DEV_FILE,
    PROMPT_AND_RESPONSE,
    TRAIN_FILE,
    SelfGeneratedData,
    SelfGeneratedOptions,
    forget_prompts,
)
from skipdecode.generation.speed import Method
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.schedule import Schedule

_HELD_OUT = 3  # other random prompts than those of `skipdecode tune --self`


@dataclass(frozen=True)
class ReferenceFreeEvaluation:
    """Schedules of a model, none of full depth, that are compared with a base model, which may be the same.

    Without a `source` of prompts, the base model draws them.
    """

    RECORDS: ClassVar = 128
    TOKENS: ClassVar = 256

    llm: LLM
    base: LLM
    schedules: Sequence[Schedule]
    source: PromptSource | None
    options: EvaluationOptions
    until: float = math.inf

    def run(self, out: Path) -> Run:
        """Generate, compare, time and save; raises OutputError if `out` has a result that is not to be replaced."""
        loaded, base, backend = self.llm.loaded, self.base.loaded, self.llm.backend
        note(f"base model: {base.checkpoint.name}; engine: {backend.name}")
        reference = self._reference
        full = reference if self.base is self.llm else Method(backend)
        methods = [Method(backend, schedule) for schedule in self.schedules]
        methods += with_w8a8(backend, self.schedules) if self.options.w8a8 else []
        template, records, prompts = self._prompts(out)
        settings = replace(self.options.part(EvaluationSettings), max_new_tokens=self._generated.self_tokens)
        about = {
            **model_about(self.llm, self.options.name),
            "base": base.checkpoint.name,
            "base_checkpoint": checkpoint_digest(base),
            "self_generated": asdict(self._generated),
            "template": template.to_dict(),
            "settings": asdict(settings),
            "methods": [method.settings() for method in methods],
            "engine": full.engine,
            "tuned": (loaded.checkpoint.document or {}).get("result"),
        }
        variants = list(dict.fromkeys([reference, full, *methods]))
        tokenizer: Any = base.tokenizer
        depends_on = about | {"prompts": prompts, "reference": reference.settings()}
        with unfinished_log(out, depends_on, [out], overwrite=self.options.overwrite) as log:
            with progress_bar(len(prompts), "text", name="texts") as bar:
                generated = generate_all(
                    variants,
                    prompts,
                    settings,
                    log,
                    eos=end_tokens(base.model, tokenizer),
                    progress=bar.update,
                    until=self.until,
                    sampling=self._sampling,
                )
            texts = {variant: outputs.tokens for variant, outputs in generated.items()}
            finished = len(texts[reference])
            records, prompts = records[:finished], prompts[:finished]
            rows = self._rows(texts, prompts)
            lengths = [len(text) for text in texts[reference]]
            speeds = measured_speeds([full, *methods], prompts, lengths, settings, log, self.until)
        for variant, row in zip(variants, rows, strict=True):
            row |= speeds.get(variant, {})
        texts_of = {method.name: method.texts(texts[method], tokenizer) for method in variants}
        document = heading("self-generated") | {"n": len(prompts), "engine": full.engine, "rows": rows}
        document |= {"outputs": OUTPUTS_FILE, "config": about, "environment": environment()}
        outputs = [
            {"id": record.id, "prompt": record.prompt, "texts": {name: rows[i] for name, rows in texts_of.items()}}
            for i, record in enumerate(records)
        ]
        forget_prompts(out)
        return save_run(out, document, outputs)

    @cached_property
    def _reference(self) -> Method:
        """The base model at full depth, with which the others are compared."""
        return Method(self.base.backend, name="base")

    @cached_property
    def _generated(self) -> SelfGeneratedOptions:
        return SelfGeneratedOptions(
            self=True,
            prompts=None if self.source is None else self.source.name,
            self_records=None if self.source and self.options.spread else self.options.limit or self.RECORDS,
            self_tokens=self.options.max_new_tokens or self.TOKENS,
            self_temperature=self.options.temperature,
            self_top_p=self.options.top_p,
        )

    def _sampling(self, method: Method, index: int) -> Sampling:
        return self._generated.answers(self.options.seed, method.backend.sampling).for_row(index)

    def _prompts(self, out: Path) -> tuple[PromptTemplate, list[Record], list[list[int]]]:
        """The template, prompts that the checkpoint was not tuned on, and the token ids of the prompts."""
        loaded, base = self.llm.loaded, self.base.loaded
        tuned = PromptTemplate("{prompt}", chat=True) if self.options.chat else loaded.checkpoint.recipe.template
        template = (tuned or PROMPT_AND_RESPONSE).for_tokenizer(base.tokenizer)
        data = SelfGeneratedData(
            llm=self.base,
            template=template,
            options=self._generated,
            source=self.source,
            directory=out,
            seed=row_seed(self.options.seed, _HELD_OUT),
            skip_bad=self.options.bad_records == "skip",
            overwrite=self.options.overwrite,
        )
        files = (loaded.checkpoint.own_folder / file for file in (TRAIN_FILE, DEV_FILE))
        learned = (row for file in files if file.is_file() for _, row in read_rows(file))
        rows = (row for row in learned if isinstance(row, dict) and row.keys() >= set(template.fields))
        records = Records(tuple(data.prompts(map(template.render, rows))))
        if self.options.spread:
            records = records.spread(self.options.limit or self.RECORDS)
        room = prompt_room(context_length(base.model.config), self._generated.self_tokens)
        fitting, ids = encode_prompts(template, records, base.tokenizer, room=room, skip_bad=True)
        note_left_out(fitting.skipped)
        return template, list(fitting.items), ids

    def _rows(self, texts: Mapping[Method, list[list[int]]], prompts: list[list[int]]) -> list[dict[str, Any]]:
        """The result of each method, from all their texts. JSON-ready."""
        base = self._reference
        draws = {"resamples": self.options.resamples, "seed": self.options.seed}
        # All at once, because equal prompts run once.
        all_texts = [text for method in texts for text in texts[method]]
        with progress_bar(len(all_texts), "text", name="perplexity") as bar:
            repeated = prompts * len(texts)
            scored = text_scores(base.backend, base.schedule, repeated, all_texts, self.options.batch_size, bar.update)
        scores = iter(scored)
        losses = {m: token_sums([score.losses for score in islice(scores, len(prompts))]) for m in texts}
        table = []
        for method, outputs in texts.items():
            perplexity = compare(losses[base], losses[method], lambda total: math.exp(ratio_of_sums(total)), **draws)
            row: dict[str, Any] = {
                "name": method.name,
                **{n: value for n, value in method.settings().items() if n == "quantization"},
                "nominal_speedup": method.schedule.nominal_speedup,
                "mean_tokens": sum(map(len, outputs)) / len(outputs),
                "perplexity": perplexity.b,
                "of_base": perplexity.ratio and asdict(perplexity.ratio),
            }
            if method is not base and self.options.teacher_forced:
                with progress_bar(len(prompts), "text", name=f"fidelity, {method.name}") as bar:
                    measure = partial(token_fidelity, method.backend.model, method.schedule, teacher=base.backend.model)
                    tokens = measure_in_batches(measure, prompts, texts[base], self.options.batch_size, bar.update)
                for name in ("kl", "top1_agreement"):
                    values, score = [row[name] for row in tokens], partial(ratio_score, name)
                    row[name] = asdict(interval(token_sums(values), score, **draws))
            table.append(row)
        return table


_COLUMNS = {
    "schedule": "{name}",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "nominal": "{nominal_speedup:.2f}x",
    "KL": "{kl[estimate]:.3f}",
    "same token": "{top1_agreement[estimate]:.1f}%",
    "perplexity": "{perplexity:.2f}",
    "against base": "{of_base[estimate]:.3f} [{of_base[low]:.3f}, {of_base[high]:.3f}]",
}
_TITLE = (
    "{n} prompts. KL, same token: on the base model's texts. Perplexity: of the base model on the texts of each\n"
    "schedule, and its ratio [95% interval]. Request, decode: speed-up over full depth on the same engine.\n"
)


def reference_free_table(document: Mapping[str, Any]) -> str:
    """The table of an evaluation without references, in Markdown."""
    return "\n".join([_TITLE.format(n=document["n"]), *figures(_COLUMNS, document["rows"])])
