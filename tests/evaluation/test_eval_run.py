"""Evaluation runs: fidelity against cached decoding, results that repeat, what a run file says, and runs that go on."""

from __future__ import annotations

import json
import math
import shutil
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import byte_tokenizer
from eval_tools import arguments, prepare
from quality_runs import score
from skipdecode import Schedule, attach
from skipdecode.cli import main
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import heading
from skipdecode.data.records import Record, Reject
from skipdecode.data.source import Records
from skipdecode.data.tasks import Task
from skipdecode.engine.opening import Backend
from skipdecode.errors import DataError, OutputError
from skipdecode.evaluation.compare import compare_runs
from skipdecode.evaluation.metrics import METRICS, make_metrics
from skipdecode.evaluation.results import EvaluationSettings, Run, check_free, load_run
from skipdecode.evaluation.run import TaskEvaluation, encode_prompts
from skipdecode.evaluation.scores import agreement_tables, ratio_score, token_fidelity, token_sums
from skipdecode.generation.speed import Method
from textgen_tools import log_entries
from tiny import LAYERS, tiny_model

SCHEDULE = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=6)
TASK = Task("mine", "Say {text}:", ("answer",), ("bleu",), 10)
RECORDS = Records(
    tuple(
        Record(i, i + 1, f"r{i}", f"Say {'word ' * (i + 1)}:", references=(f"answer number {i}", "b" * i or "a"))
        for i in range(7)
    ),
    skipped=(Reject(9, "no reference text"),),
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab_size=259)


def evaluation(model: Any, metrics: list[str], until: float = math.inf) -> TaskEvaluation:
    settings = EvaluationSettings(batch_size=3, resamples=50, max_new_tokens=TASK.max_new_tokens)
    _, prompts = encode_prompts(TASK.template, RECORDS, byte_tokenizer())
    about, scored = {"model": "tiny"}, make_metrics(metrics)
    return TaskEvaluation(model, byte_tokenizer(), TASK, RECORDS, prompts, scored, settings, about, until)


def evaluated(model: Any, out: Path, method: Method) -> Run:
    """The run of a method, with full depth beside it."""
    out.mkdir(parents=True, exist_ok=True)
    full = {} if method.full_depth else {out / "full": Method(Backend(model))}
    *_, run = evaluation(model, ["bleu", "rougeL"]).run({**full, out: method}, out)
    return run


def test_an_evaluation_ends_at_the_clock_with_the_records_that_are_finished(model: Any, tmp_path: Path):
    methods = {tmp_path / "full": Method(Backend(model)), tmp_path / "own": Method(Backend(model), SCHEDULE)}
    full, own = evaluation(model, ["rougeL"], time.perf_counter()).run(methods, tmp_path)
    assert full.data["n"] == own.data["n"] == 2  # the first group has no limit
    assert [row["id"] for row in own.outputs] == ["r0", "r1"]
    assert own.data["request_speedup"] is None  # no time was left to measure it
    later = evaluation(model, ["rougeL"], time.perf_counter() + 3)
    *_, own = later.run({path / "later": method for path, method in methods.items()}, tmp_path / "later")
    assert own.data["request_speedup"] > 0


@pytest.fixture(scope="module")
def full(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of full depth, which no test changes."""
    return evaluated(model, tmp_path_factory.mktemp("full"), Method(Backend(model)))


@pytest.fixture(scope="module")
def skipping(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the schedule with full depth beside it, which no test changes."""
    return evaluated(model, tmp_path_factory.mktemp("skipping"), Method(Backend(model), SCHEDULE))


def test_texts_end_at_the_stop_strings_of_the_checkpoint_as_those_of_generate(model: Any, full: Run, tmp_path: Path):
    whole = [row["output"] for row in full.outputs]
    stop = next(letter for letter in "".join(whole) if letter.isprintable() and letter != " ")
    backend = Backend(model)
    backend.stop = (stop,)
    run = evaluated(model, tmp_path / "cut", Method(backend))
    assert [row["output"] for row in run.outputs] == [text.split(stop)[0].strip() for text in whole] != whole
    assert run.data["config"]["method"]["rules"] == {"stop_strings": [stop]}
    killed(model, tmp_path / "begun")
    with pytest.raises(OutputError, match="methods"):  # outputs under two sets of rules are not mixed
        evaluated(model, tmp_path / "begun", Method(backend))


# ---------------------------------------------------------------------- fidelity


def fidelity_tables(*arguments: Any) -> dict[str, Any]:
    rows = token_fidelity(*arguments)
    return {name: token_sums([row[name] for row in rows]) for name in ("kl", "top1_agreement")}


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_teacher_forced_fidelity_equals_cached_decoding(family: str):
    model = tiny_model(family)
    prompts, outputs = [[5, 6, 7, 8, 9], [11, 12]], [[20, 21, 22, 23, 24, 25], [30, 31, 32]]
    tables = fidelity_tables(model, SCHEDULE, prompts, outputs)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        full = stepwise(model, Schedule.full(LAYERS), prompt, output)
        skipped = stepwise(model, SCHEDULE, prompt, output)
        divergence = (full.exp() * (full - skipped)).sum().item()
        same = (full.argmax(-1) == skipped.argmax(-1)).sum().item()
        assert tables["kl"][row] == pytest.approx((divergence, len(output)), abs=1e-4)
        assert tables["top1_agreement"][row] == pytest.approx((same, len(output)))


def stepwise(model: Any, schedule: Schedule, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probabilities (len(output), vocabulary) from decoding token by token with a cache."""
    rows = []
    with torch.no_grad(), attach(model, schedule) as attachment:
        cache = attachment.new_cache(len(prompt))
        step = torch.tensor([prompt])
        for token in output:
            rows.append(model(step, past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1))
            step = torch.tensor([[token]])
    return torch.stack(rows)


def test_free_running_fidelity_by_hand():
    tables = agreement_tables([[1, 2, 3], [1, 2], [5]], [[1, 2, 3], [1, 9, 3, 4], []])
    assert ratio_score("full_depth_agreement", tables["full_depth_agreement"].sum(axis=0)) == pytest.approx(100 / 3)
    # 3 of 3, 1 of 4, 0 of 1 tokens.
    assert ratio_score("token_agreement", tables["token_agreement"].sum(axis=0)) == pytest.approx(100 * 4 / 8)


# ---------------------------------------------------------------------- runs


def test_a_run_says_all_that_is_needed(skipping: Run, full: Run):
    assert full.data["decode_speedup"] == full.data["nominal_speedup"] == 1
    assert full.data["full_depth_speed"] is None
    assert "kl" not in full.data["metrics"]
    run = load_run(skipping.path)
    data = run.data
    assert data["n"] == len(run.outputs) == 7
    assert data["nominal_speedup"] == SCHEDULE.nominal_speedup
    assert data["decode_speedup"] > 0
    assert data["decode_speedup_interval"]["low"] <= data["decode_speedup"] <= data["decode_speedup_interval"]["high"]
    fidelity = {"full_depth_agreement", "token_agreement", "top1_agreement", "kl"}
    assert set(data["metrics"]) == {"bleu", "rougeL", "loss"} | fidelity
    assert Schedule.from_dict(data["config"]["method"]["schedule"]) == SCHEDULE
    assert data["config"]["settings"]["max_new_tokens"] == TASK.max_new_tokens
    assert data["config"]["data_sha256"] == RECORDS.digest()
    assert data["config"]["skipped_records"] == [[9, "no reference text"]]
    assert 3 <= data["free_running"]["layers_per_token"] <= 6
    assert data["full_depth_speed"]["layers_per_token"] == LAYERS
    assert data["environment"]["packages"]["torch"] == torch.__version__
    for row, record in zip(run.outputs, RECORDS.items, strict=True):
        assert (row["id"], tuple(row["references"])) == (record.id, record.references)
        assert row["prompt"] == record.prompt
        assert row["output"] == TASK.cut(byte_tokenizer().decode(row["tokens"], skip_special_tokens=True))
    for metric in make_metrics(["bleu", "rougeL"]):
        table = metric.statistics([row["output"] for row in run.outputs], [row["references"] for row in run.outputs])
        assert score(run, metric.name) == pytest.approx(metric.score(table.sum(axis=0)))
        assert np.allclose(run.table(metric.name), table)


class Counted(Method):
    """Full depth that counts its batches, and dies in the one after `last`."""

    calls, last = 0, math.inf

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > self.last:
            raise KeyboardInterrupt
        return super().generate(*args, **kwargs)


def killed(model: Any, out: Path) -> None:
    """Begin an evaluation that dies in its second batch."""
    method = Counted(Backend(model))
    method.last = 1
    with pytest.raises(KeyboardInterrupt):
        evaluated(model, out, method)


def test_a_killed_run_goes_on_where_it_stopped(model: Any, full: Run, tmp_path: Path):
    killed(model, tmp_path / "run")
    partial = tmp_path / "run" / "unfinished.sqlite"
    assert [*log_entries(partial)] == ["batch 0"]
    counted = Counted(Backend(model))
    run = evaluated(model, tmp_path / "run", counted)
    # Two of three batches.
    assert counted.calls == 2
    assert run.outputs == full.outputs
    assert not partial.exists()


# ---------------------------------------------------------------------- comparison and files


def test_runs_on_other_records_are_not_compared(full: Run, skipping: Run):
    first, second = full, skipping
    pairs = compare_runs([first, second], resamples=50)
    assert [(p.metric, p.a, p.b) for p in pairs] == [(m, "full", "skipdecode") for m in ("bleu", "rougeL", "loss")]
    assert compare_runs([first, first], ["bleu"])[0].comparison.difference.estimate == 0
    with pytest.raises(DataError, match="has no kl: it has bleu, rougeL"):
        compare_runs([first, second], ["kl"])
    other = dict(second.data, config=dict(second.data["config"], data_sha256="0"))
    with pytest.raises(DataError, match="different records"):
        compare_runs([first, Run(second.path, other)])
    scored = {**second.data["metrics"], "bleu": {**second.data["metrics"]["bleu"], "signature": "tok:none"}}
    with pytest.raises(DataError, match="scored differently"):
        compare_runs([first, Run(second.path, dict(second.data, metrics=scored))])


def test_files_that_are_no_run_are_refused(full: Run, tmp_path: Path):
    run = load_run(shutil.copytree(full.path.parent, tmp_path, dirs_exist_ok=True))
    with pytest.raises(OutputError, match="holds a run already: give `overwrite`"):
        check_free(tmp_path, overwrite=False)
    check_free(tmp_path, overwrite=True)
    lines = (tmp_path / "outputs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "outputs.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(DataError, match="has 6 of 7 records"):
        load_run(tmp_path).table("bleu")
    with pytest.raises(DataError, match="cannot be read"):
        _ = Run(tmp_path / "elsewhere" / "run.json", run.data).outputs
    older = json.dumps(dict(run.data, kind="eval"))
    for text, message in (
        ("{", "not JSON"),
        ("[]", "has no kind"),
        (older, "is of kind 'eval': accepted are"),
        (json.dumps(heading("evaluation")), "lacks 'name'"),
    ):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(DataError, match=message):
            load_run(tmp_path / "run.json")
    (tmp_path / "run.json").write_text(json.dumps(dict(run.data, format=99)))
    with pytest.raises(DataError, match="not 99"):
        load_run(tmp_path)
    with pytest.raises(DataError, match=r"nothing\.json: No such file"):
        load_run(tmp_path / "nothing.json")


def test_the_environment_names_versions_and_no_host():
    import platform

    record = environment()
    assert record["packages"]["transformers"]
    assert record["cores"] >= 1
    assert record["threads"] == torch.get_num_threads()
    assert record["commit"] is None or len(record["commit"]) == 40
    assert platform.node() not in json.dumps(record).split('"') or not platform.node()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval")
    prepare(path)
    return path


def interrupt_scoring(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C arrives when ROUGE-L is computed for the `call`-th time."""
    statistics, calls = METRICS["rougeL"].statistics, count(1)

    def interrupted(self: Any, *args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return statistics(self, *args)

    monkeypatch.setattr(METRICS["rougeL"], "statistics", interrupted)


def test_several_methods_go_on_after_an_interruption_while_scoring(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names = ["full", "skipdecode-2x", "skipdecode-1.5x"]
    more = ["--seq-len", "6", "--methods", "full", "2x", "1.5x"]
    out, unbroken = tmp_path / "out", tmp_path / "unbroken"
    assert main(arguments(folder, "--out", str(unbroken), *more)) == 0
    with monkeypatch.context() as patch:
        interrupt_scoring(patch, 2)
        assert main(arguments(folder, "--out", str(out), *more)) == 130
    finished = {name: (out / "full" / name).stat().st_mtime_ns for name in ("run.json", "outputs.jsonl")}
    assert not (out / "skipdecode-2x" / "run.json").exists()
    entries = log_entries(out / "unfinished.sqlite").items()
    batches, turns = ([row for row in entries if row[0].startswith(what)] for what in ("batch", "speed 4"))
    # Another run may not replace what is finished, nor take over or throw away what is not.
    assert main(arguments(folder, "--out", str(out), "--max-new-tokens", "5", *more)) == 2
    assert "give --overwrite to begin anew" in capsys.readouterr().err
    assert finished == {name: (out / "full" / name).stat().st_mtime_ns for name in finished}
    # The same command goes on.
    assert main(arguments(folder, "--out", str(out), *more)) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()[-3:]] == names
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    assert finished == {name: (out / "full" / name).stat().st_mtime_ns for name in finished}
    for number, name in enumerate(names):
        run, whole = load_run(out / name), load_run(unbroken / name)
        assert run.outputs == whole.outputs
        assert run.data["metrics"] == whole.data["metrics"]
        # The times are those of the first call: nothing was generated again.
        assert run.data["free_running"]["decode_seconds"] == sum(s[number]["decode_seconds"] for _, s in batches)
        # Of one round after the other, two batches each, the medians.
        rounds = [[side[number]["decode_seconds"] for _, side in turns[batch::2]] for batch in range(2)]
        assert run.data["speed"]["decode_seconds"] == pytest.approx(sum(map(median, rounds)))
    assert main(arguments(folder, "--out", str(out), *more)) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_other_metrics_after_an_interruption_score_all_methods_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    call = arguments(folder, "--out", str(tmp_path), "--seq-len", "6", "--methods", "full", "2x")
    with monkeypatch.context() as patch:
        interrupt_scoring(patch, 2)
        assert main(call) == 130
    assert main([*call, "--metrics", "rouge1"]) == 0
    for name in ("full", "skipdecode-2x"):
        metrics = load_run(tmp_path / name).data["metrics"]
        assert "rouge1" in metrics
        assert "rougeL" not in metrics
