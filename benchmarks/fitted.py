"""What fits are worth without training: schedules with a fit and without one, on held-out texts.

    python benchmarks/fitted.py --runs runs --data DATA --only chat news
    python benchmarks/fitted.py --runs runs --data DATA --only speed

DATA has e2e/ and cnn_dm/ (train.jsonl, test.jsonl). In --runs: chat-words/ with self.jsonl and self-dev.jsonl, which
`skipdecode tune smollm2-135m --self --self-records 260 --self-tokens 96 --self-temperature 0 --steps 1` writes;
e2e-full/, tuned for full depth alone; gemma3-270m/ (`benchmarks/gemma3_checkpoint.py`). What is finished stays in
--runs, so a killed call goes on; each call writes all that is there to --out.

Methods: `today` is the identity over skipped layers and the layer's own projection for prompts; `bias` a constant a
gap of skipped layers; `patch` one full-rank map a gap, both fitted on full depth's states (as LinearPatch and
Ghosted Layers do); `fitted` is `skipdecode.learning.fitting`, with one tap or without.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from invented_names import invented_names
from shared import RESULTS, script_parser, write_json, write_result
from unseen_names import WORDS, questions

from skipdecode import Schedule
from skipdecode.common.bootstrap import Table, interval, ratio_of_sums
from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import note
from skipdecode.data.batches import Batch, collate
from skipdecode.data.prompts import Example
from skipdecode.data.tasks import load_task
from skipdecode.engine.opening import Backend, end_tokens, open_engines
from skipdecode.evaluation.methods import Generation, Method
from skipdecode.evaluation.metrics import METRICS
from skipdecode.evaluation.scores import token_fidelity, token_losses
from skipdecode.evaluation.settings import EvaluationSettings, MetricOptions
from skipdecode.evaluation.speed import speed_entries, time_equal_lengths
from skipdecode.learning.fitting import Fitter
from skipdecode.learning.settings import FitOptions
from skipdecode.models.carried import FIT_FILE, bundled_schedules
from skipdecode.models.fit import Fit, keep_fit
from skipdecode.models.loading.base_weights import base_sample
from skipdecode.models.loading.hub import LoadedModel, load_model
from skipdecode.models.maps import Bridge, normed

ORDER = (4, 5, 17, 14, 25, 6, 12, 3, 26, 7, 16, 13, 11, 23, 19)  # calibrated on SmolLM2's own answers (chat_runs.py)
GEMMA_ORDER = (9, 10, 8, 11, 7, 12)
BATCH = 8
RIDGE = 3e-3
FREE_TOKENS = 40
SIDES = (
    "today/prompt15",
    "fitted/prompt15",
    "fitted, one tap/prompt15",
    "today/answers25",
    "fitted/answers25",
    "fitted, one tap/prompt15-answers28",
    "fitted, one tap/prompt12-answers28",
    "fitted, one tap/prompt10-answers28",
)
SENTENCES = (
    "{0} lives in {1} and owns {2} books.",
    "The train from {0} to {1} leaves from platform {2}.",
    "{0} paid {2} euros for the painting of {1}.",
    "Order number {2} was sent from {0} to {1}.",
)

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of what follows."""


@dataclass(frozen=True)
class Probe:
    """Prompts whose invented names and numbers should stand in the answers."""

    prompts: Sequence[Sequence[int]]
    wanted: Sequence[Sequence[str]]
    tokens: int


@dataclass(frozen=True)
class Setting:
    """A model, texts to fit on and held-out ones, and what is compared on them."""

    loaded: LoadedModel
    fit: Sequence[Text]
    held_out: Sequence[Text]
    schedules: Sequence[Schedule]
    order: tuple[int, ...]
    probe: Probe
    references: Sequence[Sequence[str]] = ()
    stop: str = ""


# ---------------------------------------------------------------------- schedules


def scheduled(layers: int, order: tuple[int, ...], prompt: int, answers: int) -> Schedule:
    """Prompts through the lower `prompt` layers, answers through `answers` of them."""
    name = "-".join([f"prompt{prompt}"] * (prompt < layers) + [f"answers{answers}"] * (answers < layers))
    shallow: Any = "full" if prompt == layers else range(prompt)
    return Schedule(layers, order, (answers,), 1, shallow, name)


def several(layers: int, order: tuple[int, ...], *pairs: tuple[int, int]) -> list[Schedule]:
    """Schedules of (prompt layers, answer layers)."""
    return [scheduled(layers, order, *pair) for pair in pairs]


# ---------------------------------------------------------------------- settings


def read_rows(file: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of JSON lines."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def chat_setting(options: argparse.Namespace) -> Setting:
    """SmolLM2's own conversations."""
    loaded = load_model("smollm2-135m", dtype="float32")
    tokenizer: Any = loaded.tokenizer
    rows = [row for name in ("self", "self-dev") for row in read_rows(options.runs / f"chat-words/{name}.jsonl", 10**6)]
    texts = chat_texts(tokenizer, rows)
    cut = len(texts) // 6
    pairs = ((15, 30), (30, 23), (15, 28), (12, 28), (30, 25), (10, 30), (10, 28))
    schedules = several(30, ORDER, *pairs)
    return Setting(loaded, texts[cut:], texts[:cut], schedules, ORDER, repeat_probe(tokenizer, chat=True))


def news_texts(tokenizer: Any, file: Path, count: int, prompt: int = 192, more: int = 64) -> list[Text]:
    """Articles that are long enough, cut."""
    texts = [ids(tokenizer, row["article"], True)[: prompt + more] for row in read_rows(file, 10**6)]
    return [(text[:prompt], text[prompt:]) for text in texts if len(text) == prompt + more][:count]


def news_setting(options: argparse.Namespace) -> Setting:
    """News articles to continue."""
    loaded = load_model("smollm2-135m", dtype="float32")
    pairs = ((30, 25), (10, 30), (15, 30))
    return of_news(loaded, options, several(30, ORDER, *pairs), ORDER, (64, 20))


def gemma_setting(options: argparse.Namespace) -> Setting:
    """The same with Gemma 3 270M, a base model."""
    loaded = load_model(str(options.runs / "gemma3-270m"), dtype="float32")
    pairs = ((12, 18), (9, 18), (18, 15), (9, 15))
    return of_news(loaded, options, several(18, GEMMA_ORDER, *pairs), GEMMA_ORDER, (64, 24))


def of_news(
    loaded: LoadedModel,
    options: argparse.Namespace,
    schedules: Sequence[Schedule],
    order: tuple[int, ...],
    counts: tuple[int, int],
) -> Setting:
    """A setting of CNN/DailyMail articles."""
    folder = options.data / "cnn_dm"
    fit, held_out = (
        news_texts(loaded.tokenizer, folder / name, count)
        for name, count in zip(("train.jsonl", "test.jsonl"), counts, strict=True)
    )
    return Setting(loaded, fit, held_out, schedules, order, repeat_probe(loaded.tokenizer, chat=False))


def e2e_setting(options: argparse.Namespace) -> Setting:
    """Descriptions of restaurants, by a checkpoint tuned for full depth alone."""
    loaded = load_model(str(options.runs / "e2e-full"), dtype="float32")
    task = load_task("e2e")
    template, tokenizer = task.template(), loaded.tokenizer
    train = read_rows(options.data / "e2e/train.jsonl", 42_000)[::130]
    fit = [(template.render(template.values(row)), str(row["ref"])) for row in train]
    test = list({template.render(template.values(row)): row["refs"] for row in read_rows(
        options.data / "e2e/test.jsonl", 1000)}.items())[::6]  # fmt: skip
    ends = [tokenizer.eos_token_id]  # type: ignore[union-attr]

    def encoded(pairs: Iterable[tuple[str, str]]) -> list[Text]:
        return [(ids(tokenizer, prompt, True), [*ids(tokenizer, text), *ends]) for prompt, text in pairs]

    held_out, references = encoded((prompt, refs[0]) for prompt, refs in test), [refs for _, refs in test]
    asked = questions(options.data / "e2e/test.jsonl", 64)
    probe = Probe([ids(tokenizer, text, True) for text, _ in asked], [names for _, names in asked], 48)
    schedules = several(30, ORDER, (15, 30), (10, 30), (30, 25), (15, 25))
    return Setting(loaded, encoded(fit), held_out, schedules, ORDER, probe, references, "".join(task.stop))


SETTINGS: Mapping[str, Callable[[argparse.Namespace], Setting]] = {
    "chat": chat_setting,
    "news": news_setting,
    "e2e": e2e_setting,
    "gemma3": gemma_setting,
}


def ids(tokenizer: Any, text: str, whole: bool = False) -> list[int]:
    """Token ids; of a whole text with what the tokenizer puts in front."""
    found: list[int] = tokenizer(text, add_special_tokens=whole, verbose=False).input_ids
    return found


def chat_prompt(tokenizer: Any, words: str) -> list[int]:
    """Token ids of a user's words up to where the answer begins."""
    turns = [{"role": "user", "content": words}]
    found: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids
    return found


def chat_texts(tokenizer: Any, rows: Iterable[Mapping[str, str]]) -> list[Text]:
    """Token ids of conversations, from rows of self-generated data."""
    return [
        (chat_prompt(tokenizer, row["prompt"]), [*ids(tokenizer, row["response"]), tokenizer.eos_token_id])
        for row in rows
    ]


def repeat_probe(tokenizer: Any, chat: bool, count: int = 40) -> Probe:
    """Sentences with two invented names and a number, to be said once more."""
    draw, prompts, wanted = random.Random(5), [], []
    for n in range(count):
        names = list(invented_names(["a", "b"], draw, WORDS).values())
        found = [*names, str(draw.randint(1000, 99999))]
        sentence = SENTENCES[n % len(SENTENCES)].format(*found)
        if chat:
            prompts.append(chat_prompt(tokenizer, f"Repeat this sentence word for word: {sentence}"))
        else:
            prompts.append(ids(tokenizer, f'He said: "{sentence}" She wrote down: "{sentence}" They read: "', True))
        wanted.append(found)
    return Probe(prompts, wanted, 48)


# ---------------------------------------------------------------------- fits


def batches_of(texts: Sequence[Text]) -> list[Batch]:
    """Aligned batches, texts of like length together, in an order that mixes lengths."""
    examples = [Example(str(n), tuple(prompt), tuple(more)) for n, (prompt, more) in enumerate(texts)]
    examples.sort(key=lambda e: (len(e.prompt), len(e.response)))
    groups = [examples[first : first + BATCH] for first in range(0, len(examples), BATCH)]
    random.Random(0).shuffle(groups)
    return [collate(group) for group in groups]


def save_fit(out: Path, model: Any, fit: Fit, schedules: Iterable[Schedule]) -> None:
    """Write a fit, with a sample of its weights, and its schedules by their names."""
    fit.about["base"] = base_sample(model)
    out.mkdir(parents=True, exist_ok=True)
    fit.save(out / FIT_FILE)
    for schedule in schedules:
        schedule.save(out / f"{schedule.name}.json")


def timed_fit(
    model: Any, schedules: Sequence[Schedule], batches: Sequence[Batch], options: FitOptions
) -> tuple[Fit, dict[str, Any]]:
    """A fit, and what it took; memory is the most that the process has held, weights included."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    fit = Fitter(model, batches, options).fit(schedules)
    return fit, {
        "tokens": sum(batch.tokens for batch in batches),
        "schedules": [schedule.name for schedule in schedules],
        "seconds": time.monotonic() - start,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_mib_before": before / 1024,
        "threads": torch.get_num_threads(),
    }


def made_fit(setting: Setting, file: Path, rank: int, taps: int, schedules: Sequence[Schedule] = ()) -> Fit:
    """A fit for all schedules of a setting, from the file that an earlier call left or made now."""
    if not file.exists():
        batches = batches_of(setting.fit)
        chosen = FitOptions(fit_rank=rank, fit_taps=taps)
        fit, took = timed_fit(setting.loaded.model, schedules or setting.schedules, batches, chosen)
        fit.about["took"] = took
        fit.save(file)
        note(f"{file.name}: {took}")
    return Fit.load(file)


class TeacherMaps:
    """What full depth's own states say of gaps of skipped layers: a map of full rank, and a constant."""

    def __init__(self, setting: Setting) -> None:
        self._width = int(setting.loaded.model.config.get_text_config(decoder=True).hidden_size)
        self._layers = setting.schedules[0].num_layers
        gaps = sorted({gap for schedule in setting.schedules for gap in gaps_of(schedule.dropped)})
        size = self._width + 1
        gram = {gap: torch.zeros(size, size, dtype=torch.float64) for gap in gaps}
        cross = {gap: torch.zeros(size, self._width, dtype=torch.float64) for gap in gaps}
        for batch in batches_of(setting.fit):
            chosen = batch.attention_mask.bool()
            chosen[:, : batch.prompt_length] = False
            call = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
            call |= {"position_ids": batch.position_ids, "output_hidden_states": True, "logits_to_keep": 1}
            with torch.inference_mode():
                states = setting.loaded.model(**call).hidden_states
            for gap in gaps:
                before, after = states[gap[0]][chosen], states[gap[1] + 1][chosen]
                weight = torch.rsqrt(after.square().mean(-1, keepdim=True) + 1e-12)
                x = torch.cat((normed(before), torch.ones_like(weight)), 1) * weight
                gram[gap] += (x.T @ x).double()
                cross[gap] += (x.T @ ((after - before) * weight)).double()
        self._solved = {gap: (self._solve(gram[gap], cross[gap]), cross[gap][-1] / gram[gap][-1, -1]) for gap in gaps}

    def _solve(self, gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
        penalty = torch.full((len(gram),), RIDGE * float(gram.diagonal()[:-1].mean()), dtype=torch.float64)
        penalty[-1] = 0
        return torch.linalg.solve(gram + penalty.diag(), cross)

    def fit(self, schedule: Schedule, whole: bool) -> Fit:
        """Bridges behind the gaps of a schedule: maps (`whole`), or constants."""
        bridges, nothing = {}, torch.zeros(0, self._width)
        for gap in gaps_of(schedule.dropped):
            made, mean = (part.float() for part in self._solved[gap])
            over = Bridge(torch.eye(self._width), made[:-1].T.contiguous(), made[-1])
            bridges[gap[1]] = over if whole else Bridge(nothing, nothing.T.contiguous(), mean)
        return Fit(self._layers, self._width, bridges, {})


def gaps_of(gone: Sequence[int]) -> list[tuple[int, int]]:
    """First and last layers of the runs of neighbours."""
    firsts = [n for n in sorted(gone) if n - 1 not in gone]
    lasts = [n for n in sorted(gone) if n + 1 not in gone]
    return list(zip(firsts, lasts, strict=True))


# ---------------------------------------------------------------------- measurements


class Measured:
    """Rows of a setting: each (method, schedule) once, kept in a journal."""

    def __init__(self, name: str, setting: Setting, options: argparse.Namespace) -> None:
        self.name, self.setting, self.runs = name, setting, options.runs
        about = {"fit": len(setting.fit), "held_out": len(setting.held_out), "setting": name}
        self._kept = KeptValues(options.runs / f"fitted-{name}.jsonl", about, pieces="rows", remedy="move it away")
        self._free = setting.held_out[:: max(1, len(setting.held_out) // 24)]

    def fit(self, rank: int, taps: int) -> Fit:
        """The setting's fit of a rank and taps."""
        file = self.runs / f"fitted-{self.name}-{rank}-{taps}.fit"
        some = [s for s in self.setting.schedules if rank or s.projected]
        return made_fit(self.setting, file, rank, taps, [s for s in some if rank or not s.dropped])

    def row(self, method: str, schedule: Schedule, fit: Callable[[], Fit | None], free: bool = False) -> None:
        """Measure, unless it is there; `free`: also what it writes by itself."""
        key = f"{method} {schedule.name}"
        found = self._kept.get(key) or {}
        if "fidelity" not in found or (free and "free" not in found):
            keep_fit(self.setting.loaded.model, fit())
            if "fidelity" not in found:
                found["fidelity"] = self._fidelity(schedule)
            if free:
                found["free"] = self._written(schedule)
            keep_fit(self.setting.loaded.model, None)
            found |= {"method": method, "schedule": schedule.to_dict()}
            self._kept.put(key, found)
            note(f"{self.name} {key}: {summary(found)}")

    def _fidelity(self, schedule: Schedule) -> list[list[float]]:
        """For each text its tokens, the sum of their KL divergences, and how many are full depth's."""
        model, texts = self.setting.loaded.model, sorted(self.setting.held_out, key=lambda t: len(t[0]))
        table = []
        for first in range(0, len(texts), BATCH):
            prompts, more = zip(*texts[first : first + BATCH], strict=True)
            for of_text in token_fidelity(model, schedule, prompts, more):
                kl = of_text["kl"]
                table.append([len(kl), float(kl.sum()), float(of_text["top1_agreement"].sum())])
        return table

    def _written(self, schedule: Schedule) -> dict[str, Any]:
        """What greedy decoding under the schedule gives: its perplexity to full depth, copied names, task scores."""
        setting, model = self.setting, self.setting.loaded.model
        tokenizer: Any = setting.loaded.tokenizer
        ends = set(end_tokens(model, tokenizer)) | ({ids(tokenizer, setting.stop)[-1]} if setting.stop else set())
        source = open_engines(model, "fast" if setting.loaded.model.config.model_type == "llama" else "auto", note)
        decode = Method(source, schedule)
        prompts = [list(prompt) for prompt, _ in (setting.held_out if setting.references else self._free)]
        most = 56 if setting.references else FREE_TOKENS
        outputs = decode.generate(prompts, max_new_tokens=most, eos=ends, rows=16).tokens
        probe = decode.generate(setting.probe.prompts, max_new_tokens=setting.probe.tokens, eos=ends, rows=16)
        texts = tokenizer.batch_decode(probe.tokens, skip_special_tokens=True)
        copied = [
            [sum(word in text for word in words), len(words)]
            for text, words in zip(texts, setting.probe.wanted, strict=True)
        ]
        keep_fit(model, None)
        losses = []
        for first in range(0, len(prompts), BATCH):
            pair = prompts[first : first + BATCH], outputs[first : first + BATCH]
            losses += [
                [float(loss.sum()), len(loss)]
                for loss in token_losses(model, Schedule.full(schedule.num_layers), *pair)
            ]
        found: dict[str, Any] = {"copied": copied, "losses": losses}
        if setting.references:
            said = [text.strip() for text in tokenizer.batch_decode(outputs, skip_special_tokens=True)]
            for name in ("bleu", "rougeL"):
                metric = METRICS.get(name)(MetricOptions())
                found[name] = metric.statistics(said, setting.references).tolist()
        return found


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a measured row, JSON-ready, with intervals over texts."""
    table = np.asarray(found["fidelity"])
    row: dict[str, Any] = {
        "texts": len(table),
        "tokens": int(table[:, 0].sum()),
        "kl": within(table[:, [1, 0]], ratio_of_sums),
        "equal_tokens": within(table[:, [2, 0]], ratio_of_sums),
    }
    if free := found.get("free"):
        row["perplexity_to_full_depth"] = within(np.asarray(free["losses"]), lambda t: math.exp(ratio_of_sums(t)))
        row["copied"] = within(np.asarray(free["copied"], dtype=float), ratio_of_sums)
        for name in ("bleu", "rougeL"):
            if name in free:
                row[name] = within(np.asarray(free[name]), METRICS.get(name).score)
    return row


def within(table: Table, score: Callable[[Table], float]) -> dict[str, float]:
    """A score with its interval."""
    found = interval(table, score)
    return {name: round(getattr(found, name), 5) for name in ("estimate", "low", "high")}


def measure_setting(name: str, options: argparse.Namespace) -> None:
    """All rows of a setting, what matters most first."""
    setting = SETTINGS[name](options)
    rows = Measured(name, setting, options)

    @functools.cache
    def teacher() -> TeacherMaps:
        return TeacherMaps(setting)

    methods = [("fitted, one tap" if s.projected else "fitted", s) for s in setting.schedules]
    for method, schedule in methods:
        rows.row(method, schedule, lambda: rows.fit(128, 1))
        rows.row("today", schedule, lambda: None)
    rows.row("today", Schedule.full(setting.schedules[0].num_layers), lambda: None, free=True)
    for method, schedule in methods if setting.references else methods[:1]:
        rows.row(method, schedule, lambda: rows.fit(128, 1), free=True)
        rows.row("today", schedule, lambda: None, free=True)
    for schedule in setting.schedules:
        if schedule.dropped:
            rows.row("bias", schedule, lambda s=schedule: teacher().fit(s, False))
            rows.row("patch", schedule, lambda s=schedule: teacher().fit(s, True))
    for schedule in setting.schedules:
        if schedule.projected and not schedule.dropped:
            rows.row("fitted", schedule, lambda: rows.fit(0, 0))


def measure_bundled(options: argparse.Namespace) -> None:
    """The bundled schedules of smollm2-135m with their fit and without, on conversations that the fit has not seen."""
    setting, files = chat_setting(options), bundled_schedules("smollm2-135m")
    schedules = [Schedule.load(file) for file in files]
    setting = replace(setting, fit=setting.fit[:-33], held_out=setting.fit[-33:], schedules=schedules)
    rows, fit = Measured("bundled", setting, options), Fit.load(Path(files[0]).with_name(FIT_FILE))
    rows.row("today", Schedule.full(30), lambda: None, free=True)
    for schedule in schedules:
        rows.row("fitted", schedule, lambda: fit, free=True)
        rows.row("today", schedule, lambda: None, free=True)


# ---------------------------------------------------------------------- time and memory


def measure_speed(options: argparse.Namespace) -> None:
    """Requests of chat in batches of 16 on the engine: schedules with fits and without, and full depth, in turn."""
    setting = chat_setting(options)
    model, runs = setting.loaded.model, options.runs
    fitted, tapped = (made_fit(setting, runs / f"fitted-chat-128-{taps}.fit", 128, taps) for taps in (0, 1))
    fits = {"today": None, "fitted": fitted, "fitted, one tap": tapped}
    sources: dict[str, Backend] = {}
    for name, fit in fits.items():
        keep_fit(model, fit)
        sources[name] = open_engines(model, "fast", note)
    keep_fit(model, None)
    schedules = {s.name: s for s in setting.schedules}
    methods = [Method(sources["today"])]
    for word in options.sides:
        method, _, name = word.partition("/")
        methods.append(Method(sources[method], replace(schedules[name], name=word)))
    texts = setting.held_out[:16]
    prompts, lengths = [list(prompt) for prompt, _ in texts], [max(2, len(more)) for _, more in texts]
    about = {"sides": options.sides, "records": len(texts), "batch_size": 16, "threads": torch.get_num_threads()}
    kept = KeptValues(runs / "fitted-speed-turns.jsonl", about, pieces="turns", remedy="move it away")
    turns = time_equal_lengths(methods, prompts, lengths, batch_size=16, kept=kept)
    asked = EvaluationSettings()
    rows = {m.name: speed_entries(turns, m, methods[0], asked, about) for m in methods[1:]}
    full = turns.laps(methods[0])
    for method in methods[1:]:
        laps = zip(full, turns.laps(method), strict=True)
        rows[method.name]["request_speedup_of_rounds"] = [round(seconds(a) / seconds(b), 3) for a, b in laps]
    write_json(runs / "fitted-speed.json", {**about, "rows": rows})


def seconds(lap: Generation) -> float:
    """Of whole requests."""
    return lap.prompt_seconds + lap.decode_seconds


OTHERS = {"bundled": measure_bundled, "speed": measure_speed}


# ---------------------------------------------------------------------- the result


def all_parts(runs: Path) -> dict[str, Any]:
    """All that is there."""
    parts: dict[str, Any] = {}
    for name in [*SETTINGS, "bundled"]:
        file = runs / f"fitted-{name}.jsonl"
        if file.exists():
            head, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
            rows = [{**{n: v[n] for n in ("method", "schedule")}, **summary(v)} for v in dict(lines).values()]
            fits = (Fit.load(file).about["took"] for file in sorted(runs.glob(f"fitted-{name}-*.fit")))
            parts[name] = {"texts_to_fit_on": head["settings"]["fit"], "fits": list(fits), "rows": rows}
    if (file := runs / "fitted-speed.json").exists():
        parts["speed"] = json.loads(file.read_text(encoding="utf-8"))
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write the result; returns 0."""
    parser = script_parser(__doc__, default=RESULTS / "fitted-smollm2-135m.json")
    parser.add_argument("--runs", type=Path, required=True, help="directory for fits and finished parts")
    parser.add_argument("--data", type=Path, required=True, help="directory of e2e/ and cnn_dm/")
    parser.add_argument("--only", nargs="*", choices=[*SETTINGS, *OTHERS], default=[*SETTINGS, *OTHERS])
    parser.add_argument("--sides", nargs="+", default=SIDES, help="METHOD/SCHEDULE to time")
    options = parser.parse_args(argv)
    for part in options.only:
        if part in SETTINGS:
            measure_setting(part, options)
        else:
            OTHERS[part](options)
    write_result(options.out, "fitted", all_parts(options.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
