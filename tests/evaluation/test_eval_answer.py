"""What `skipdecode eval` says: shares of full depth, speed for the same work, tables that fit; older runs are read."""

from __future__ import annotations

import pytest

from quality_runs import quality_runs, score
from skipdecode import Schedule
from skipdecode.engine.opening import Backend
from skipdecode.evaluation.compare import compare_runs, pairs_table, runs_tables
from skipdecode.evaluation.method_runs import speed_entries
from skipdecode.evaluation.results import EvaluationSettings, Run
from skipdecode.generation.speed import Method, medians_of, time_equal_lengths
from tiny import LAYERS, tiny_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    pytest.importorskip("bert_score")
    return quality_runs(tmp_path_factory.mktemp("answer") / "runs")


def test_what_is_kept_comes_first_with_its_interval(runs: dict[str, Run]):
    kept = runs["flat-4x"].data["kept"]
    assert set(kept) == {"bleu", "rougeL", "bertscore_f1"}
    for name, share in kept.items():
        assert share["estimate"] == pytest.approx(score(runs["flat-4x"], name) / score(runs["full"], name))
        assert share["low"] <= share["estimate"] <= share["high"]
    text = runs_tables(list(runs.values()))
    first = text.split("\n\n")[0]
    assert first.startswith("Kept of full depth's score")
    assert "8 records" in first
    share = kept["rougeL"]
    assert f"{100 * share['estimate']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]" in first
    assert "| full " not in first
    order = [text.index(title) for title in ("Kept", "Scores", "Speed-up", "Agreement")]
    assert order == sorted(order)
    head = next(line for line in text.splitlines() if "nominal" in line)
    assert head.index("request") < head.index("decoding") < head.index("nominal")


def test_speed_is_that_of_equal_lengths(runs: dict[str, Run]):
    """The canned methods take a tenth of a second for a batch's prompts, then time by layers and tokens."""
    four, full = runs["flat-4x"].data, runs["full"].data
    assert four["speed"]["fed_tokens"] == full["speed"]["fed_tokens"]
    assert four["free_running"]["fed_tokens"] < full["free_running"]["fed_tokens"]
    assert four["decode_speedup"] == pytest.approx(4)
    assert 1 < four["request_speedup"] < 4
    assert four["request_speedup"] == pytest.approx(full["speed"]["seconds"] / four["speed"]["seconds"])
    assert four["speed"]["records"] == 8
    assert four["speed"]["new_tokens"] == full["speed"]["fed_tokens"] + 8


def test_many_methods_fit_into_a_hundred_columns(runs: dict[str, Run]):
    names = [f"a checkpoint with a name, early_termination-{i}x" for i in range(8)]
    many = [runs["full"], *(Run(runs["flat-4x"].path, {**runs["flat-4x"].data, "name": name}) for name in names)]
    many.append(Run(runs["flat-2x"].path, {**runs["flat-2x"].data, "name": "long" * 30}))
    lines = runs_tables(many).splitlines() + pairs_table(compare_runs(many[:3], resamples=20)).splitlines()
    assert max(map(len, lines)) <= 100
    for metric in ("bleu", "rougeL", "bertscore_f1", "kl", "full_depth_agreement"):
        assert any(metric in line for line in lines)
    # Each part of a table names its rows.
    assert sum("early_termination-7x" in line for line in lines) == sum(line.startswith("| run ") for line in lines)


def test_every_method_gives_each_row_the_same_number_of_tokens():
    """Though the model would end its rows sooner."""
    model = tiny_model("llama")
    prompts, lengths = [[5, 6, 7, 8, 9], [11, 12], [3, 4, 5, 6]], [9, 4, 6]
    full = Method(Backend(model))
    model.generation_config.eos_token_id = full.generate(prompts[:1], max_new_tokens=3, eos=set()).tokens[0][2]
    methods = [full, Method(Backend(model), Schedule.constant(LAYERS, 4))]
    seen: list[int] = []
    turns = time_equal_lengths(methods, prompts, lengths, batch_size=2, progress=seen.append)
    assert sum(seen) == 3 * len(prompts)
    for method in methods:
        assert len(turns.rounds(method)) == 2
        speed = speed_entries(turns, method, full, EvaluationSettings(resamples=20), {})
        assert speed["speed"]["fed_tokens"] == sum(lengths) - len(lengths)
        assert speed["decode_speedup"] > 0 < speed["request_speedup"]
        about = {"records": len(lengths), "new_tokens": sum(lengths), "request_tokens": 10**9}
        longer = speed_entries(turns, method, full, EvaluationSettings(resamples=20), about)
        assert longer["request_speedup"] == pytest.approx(longer["decode_speedup"])
    assert medians_of(turns, methods[1])["layers_per_token"] == 4
