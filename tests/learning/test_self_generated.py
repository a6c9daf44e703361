"""A model tuned on self-generated data: from prompts, drawn or of a file, to a checkpoint and its evaluation."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from skipdecode.cli import main
from skipdecode.cost.model import CostModel
from skipdecode.data.examples import RecordOptions
from skipdecode.data.source import PromptSource
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import UsageError
from skipdecode.generation.self_generated import (
    DEV_FILE,
    TEST_FILE,
    TRAIN_FILE,
    SelfGeneratedOptions,
    _cut,
    own_answers,
)
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model
from textgen_tools import command, log_entries, read_rows, save_tiny_model, subprocess_environment, write_rows

PACE = ["--steps", "2", "--batch-size", "4", "--lora-rank", "2", "--precision", "fp32"]
WORDS = ["--self", "--self-records", "32", "--self-tokens", "200"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("own") / "model", context=512)


@pytest.fixture(scope="module")
def tuned(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "tuned"
    assert main(["tune", model, *WORDS, *PACE, "--out", str(out)]) == 0
    return out


def words(out: Path) -> list[bytes]:
    return [(out / file).read_bytes() for file in (TRAIN_FILE, DEV_FILE)]


def weights(out: Path) -> bytes:
    return (out / "adapter_model.safetensors").read_bytes()


def told(capsys: Any) -> str:
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return [line for line in printed.err.splitlines() if line.startswith("skipdecode: ")][-1]


def test_a_model_is_tuned_on_what_it_says_itself(model: str, tuned: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = json.loads((tuned / "recipe.json").read_text())
    rows, held = read_rows(tuned / TRAIN_FILE), read_rows(tuned / DEV_FILE)
    prompts = [row["prompt"] for row in (*rows, *held)]
    assert len(rows) > len(held) > 0
    assert len({*prompts}) == len(prompts) == recipe["data"]["self"]["kept"]
    assert all(row["response"].strip() for row in rows)
    assert recipe["options"]["sampled_speedups"] == [1, 1.25]
    assert recipe["options"]["distill_weight"] == 1.0
    # Who uses the checkpoint need not know the template.
    loaded = open_checkpoint(tuned)
    assert loaded.recipe is not None
    assert loaded.recipe.template == PromptTemplate("{prompt}", ("response",), True)
    assert loaded.schedule is not None
    assert loaded.schedule.is_flat
    plain = ["generate", str(tuned), "hello", "--max-new-tokens", "4"]
    assert main([*plain, "--include-prompt"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "<user>hello<assistant>"
    assert sorted(p.name for p in tuned.iterdir() if p.name.startswith("self")) == [DEV_FILE, "self.json", TRAIN_FILE]


@pytest.mark.slow
def test_same_seed_same_words_and_another_seed_others(model: str, tuned: Path, tmp_path: Path) -> None:
    assert main(["tune", model, *WORDS, *PACE, "--out", str(tmp_path / "again")]) == 0
    assert main(["tune", model, *WORDS, *PACE, "--seed", "1", "--out", str(tmp_path / "other")]) == 0
    assert words(tmp_path / "again") == words(tuned) != words(tmp_path / "other")
    assert weights(tmp_path / "again") == weights(tuned) != weights(tmp_path / "other")
    recipe = str(tuned / "recipe.json")
    assert main(["tune", "--recipe", recipe, "--out", str(tmp_path / "recipe")]) == 0
    assert words(tmp_path / "recipe") == words(tuned)


@pytest.mark.parametrize("until", ["prompts", "answers"])
@pytest.mark.slow
def test_a_run_killed_while_it_speaks_goes_on_to_the_words_of_an_unbroken_one(
    model: str, tuned: Path, tmp_path: Path, until: str
) -> None:
    out = tmp_path / "killed"
    arguments = ["tune", model, *WORDS, *PACE, "--out", str(out)]
    process = subprocess.Popen(command(*arguments), env=subprocess_environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if sum(key.startswith(f"{until} ") for key in log_entries(out / "self.sqlite")) > 2:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / TRAIN_FILE).exists()
    assert main(arguments) == 0
    assert words(out) == words(tuned)
    assert weights(out) == weights(tuned)
    # Words that were made otherwise are not gone on with.
    (out / "recipe.json").unlink()
    assert main([*arguments, "--self-tokens", "100"]) == 2


def test_an_answer_at_its_limit_ends_with_a_sentence() -> None:
    text = "Do this. And that!\n\n2. Then"
    assert _cut({"text": text, "finish_reason": "length"})["text"] == "Do this. And that!"
    for row in ({"text": text, "finish_reason": "eos"}, {"text": "No end", "finish_reason": "length"}, {"error": "x"}):
        assert _cut(row) == row


def test_prompts_of_a_file_are_answered_and_repeats_are_told(tmp_path: Path, capsys: Any) -> None:
    model = save_tiny_model(tmp_path / "plain", chat=False, context=512)
    rows = [{"colour": c, "thing": t} for c in ("red", "blue") for t in "abcdefgh"]
    file = write_rows(tmp_path / "rows.jsonl", [*rows, {"colour": "Red", "thing": " a"}])
    out = tmp_path / "out"
    options = ["--prompts", file, "--prompt-template", "{colour} {thing}\\n", "--self-tokens", "400"]
    assert main(["tune", model, "--self", *options, *PACE, "--out", str(out), "--schedule", "2x"]) == 0
    assert "1 repeated" in capsys.readouterr().err
    rows_learned = [*read_rows(out / TRAIN_FILE), *read_rows(out / DEV_FILE)]
    answers = {row["id"]: row for row in rows_learned}
    assert len(answers) == len(rows_learned)
    assert all(rows[line - 1].items() <= row.items() for line, row in answers.items())
    loaded = open_checkpoint(out)
    assert loaded.recipe is not None
    assert loaded.recipe.template == PromptTemplate("{colour} {thing}\n", ("response",))
    assert loaded.schedule is not None
    assert loaded.schedule.name == "skipdecode-2x"


def test_answers_that_run_at_the_end_of_their_time_are_cut_and_kept(model: str, tmp_path: Path) -> None:
    prompts = PromptSource.of_prompts([f"say {n}" for n in range(99)])
    options, sizes = SelfGeneratedOptions(self=True, self_tokens=400), {"held_out": 9, "tested": 48}
    loaded, begun = load_model(model), time.perf_counter()
    _, about = own_answers(loaded, options, RecordOptions(), prompts, tmp_path, seed=0, until=begun + 0.1, **sizes)
    assert time.perf_counter() - begun < 5  # 400 tokens of 99 answers take longer
    assert 32 <= about["prompts"] < 99
    assert about["kept"] > 24
    assert len(read_rows(tmp_path / TEST_FILE)) >= 99 - about["kept"]


@pytest.mark.parametrize("chats", [False, True])
def test_answers_are_learned_as_they_were_asked_for(chats: bool, model: str, tmp_path: Path, capsys: Any) -> None:
    asks = [[{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": "no"}] for c in ascii_lowercase]
    rows = [{"messages": one} if chats else {"prompt": one[0]["content"], "system": "be brief"} for one in asks]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    out, options = tmp_path / "out", ["--self-tokens", "400", "--schedule", "2x"]
    assert main(["tune", model, "--self", "--prompts", file, *options, *PACE, "--out", str(out)]) == 0
    # What the records of the answers do not have is said once.
    assert capsys.readouterr().err.count("'messages'" if chats else "'system'") == 1
    assert (out / TRAIN_FILE).read_bytes().count(b'"prompt": "say ') > 5


@pytest.mark.slow
def test_answers_to_a_task_stand_where_the_task_has_its_references(model: str, tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "name: cut\nprompt: '{post}\\n'\nreferences: [short]\ntruncate: post\nmax_prompt_tokens: 12\n"
        "response_tokens: {median: 8, p95: 16}\nmax_new_tokens: 20\nmetrics: [chrf]\n".replace("'", '"')
    )
    file = write_rows(tmp_path / "posts.jsonl", [{"post": f"{a}{b} " * 12} for a in "abcdef" for b in "ghijkl"])
    out = tmp_path / "out"
    options = ["--self", "--task", str(task), "--prompts", file, "--self-tokens", "200"]
    assert main(["tune", model, *options, *PACE, "--schedule", "1x", "--out", str(out)]) == 0
    assert all(row["short"] and len(row["post"]) == 36 for row in read_rows(out / TRAIN_FILE))
    recipe = open_checkpoint(out).recipe
    assert recipe is not None
    assert recipe.template == PromptTemplate("{post}\n", ("short",), False, "post", 12)
    # A tuned checkpoint says itself what its prompts are put into; its own full depth is none to be made ready for.
    again = tmp_path / "again"
    options = ["--self", "--prompts", file, "--self-tokens", "200", "--merge"]
    assert main(["tune", str(out), *options, *PACE, "--out", str(again)]) == 0
    assert all(row["short"] for row in read_rows(again / TRAIN_FILE))
    ready = open_checkpoint(again)
    assert ready.recipe is not None
    assert ready.recipe.template == recipe.template
    assert ready.schedule is not None
    assert ready.schedule.name == "unified-1.5x"


@pytest.mark.parametrize(
    ("more", "content", "code"),
    [
        ([], None, "chat template"),
        (["--prompts", "FILE"], "", "FILE"),
        (["--prompts", "FILE"], "\n\n", "FILE"),
        (["--prompts", "FILE", "--self-tokens", "1"], "a\nb\nc\n", "not ended"),
        (["--prompts", "FILE"], "a\nA\n  a \n", "2 are needed"),
        (["--prompts", "FILE", "--train", "x.jsonl"], "a\n", "--train"),
        (["--prompts", "FILE", "--task", "e2e", "--chat"], "a\n", "--task"),
        (["--self-records", "0"], None, "--self-records"),
        (["--no-self", "--prompts", "FILE"], "a\n", "--self"),
        (["--prompts", "FILE", "--sampled-speedups", "1", "40"], "a\nb\nc\n", "budget 1 at position 0"),
        (["--prompts", "FILE", "--sampled-prompts", "99"], "a\nb\nc\n", "prompt layers"),
    ],
)
def test_what_cannot_be_tuned_on_is_refused_in_one_line(
    tmp_path: Path, capsys: Any, more: list[str], content: str | None, code: str
) -> None:
    model = save_tiny_model(tmp_path / "plain", chat=False)
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_text(content)
    more = [str(file) if word == "FILE" else word for word in more]
    assert main(["tune", model, "--self", *PACE, "--out", str(tmp_path / "out"), *more]) == 2
    assert code.replace("FILE", str(file)) in told(capsys)
    assert not (tmp_path / "out" / "recipe.json").exists()
    if code not in ("not ended", "2 are needed"):  # nothing was said yet, so nothing is in the way of a second try
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--prompts", "prompts.txt"]])
@pytest.mark.parametrize("verb", ["tune", "eval"])
def test_no_text_is_made_without_an_end_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, verb: str, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a\nb\nc\n")
    model = save_tiny_model(tmp_path / "endless")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        file = tmp_path / "endless" / name
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if "eos_token" not in k}))
    options = ["--schedule", "2x", *more, "--out", "out"]
    own = ["--self", "--self-tokens", "4", *PACE] if verb == "tune" else ["--max-new-tokens", "4", "--resamples", "20"]
    call = [verb, model, *options, *own]
    if verb == "eval" and more:  # what is compared may end at its limit
        assert main(call) == 0
        return
    assert main(call) == 2
    assert "has no end token" in told(capsys)
    assert not Path("out").exists()


def test_answers_of_two_sets_of_rules_are_not_mixed(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    plain = json.loads(config.read_text())

    def answer(**rules: Any) -> dict[str, Any]:
        config.write_text(json.dumps(plain | rules))
        prompts, options = PromptSource.of_prompts([f"say {n}" for n in range(16)]), SelfGeneratedOptions(self=True)
        loaded = load_model(str(tmp_path / "model"))
        return own_answers(loaded, options, RecordOptions(), prompts, tmp_path, seed=0, held_out=1)[1]

    assert answer() == answer()  # the second goes on
    for rules in ({"repetition_penalty": 1.5}, {"stop_strings": ["e"]}):
        with pytest.raises(UsageError, match=r"other settings \(rules\)"):
            answer(**rules)


@pytest.mark.slow
def test_eval_tells_what_each_depth_leaves_of_the_base_model(
    model: str, tuned: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "eval"
    options = ["--limit", "12", "--max-new-tokens", "40", "--batch-size", "4", "--resamples", "20", "--out", str(out)]
    assert main(call := ["eval", str(tuned), *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    document = json.loads((out / "run.json").read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["base", "full", "unified-1.5x", "unified-1.25x"]
    assert [line.split()[1] for line in printed[5:9]] == list(rows)
    base, full, deep, shallow = rows.values()
    assert base["of_base"]["estimate"] == 1.0
    # Two steps move little at full depth, and skipping much.
    assert full["kl"]["estimate"] < 0.01 < shallow["kl"]["estimate"] < deep["kl"]["estimate"]
    assert full["top1_agreement"]["estimate"] > 90
    assert deep["perplexity"] > 1.2 * base["perplexity"]
    assert deep["decode_speedup"] > 0
    texts = read_rows(out / "outputs.jsonl")
    assert len(texts) == document["n"]
    assert not {row["prompt"] for row in texts} & {row["prompt"] for row in read_rows(tuned / TRAIN_FILE)}
    assert main(call) == 2  # there is a run
    assert main([*call, "--overwrite", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [row["kl"] for row in again["rows"][1:]] == [row["kl"] for row in document["rows"][1:]]
    # Other words in the same place.
    assert main([*call, "--limit", "6", "--max-new-tokens", "8", "--overwrite"]) == 0
    assert json.loads((out / "run.json").read_text())["config"]["self_generated"]["self_tokens"] == 8


def test_schedules_of_a_model_that_was_not_tuned_are_judged_too(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("text\nhello\nHELLO\nhow are you\n")
    options = ["--prompts", str(prompts), "--max-new-tokens", "20", "--resamples", "20", "--methods"]
    call = ["eval", model, "--out", str(tmp_path / "eval"), *options, "1.5x"]
    assert main([*call, "1.5x"]) == 2
    assert main(call) == 0
    document = json.loads((tmp_path / "eval" / "run.json").read_text())
    assert document["n"] == 2
    assert [row["name"] for row in document["rows"]] == ["base", "skipdecode-1.5x"]
    assert document["rows"][0]["decode_speedup"] == 1.0


def test_eval_says_where_no_prompt_is_left(model: str, tuned: Path, tmp_path: Path, capsys: Any) -> None:
    plain = save_tiny_model(tmp_path / "plain", chat=False)
    call = ["--out", str(tmp_path / "eval"), "--methods", "1.5x"]
    assert main(["eval", plain, *call]) == 2
    assert "--prompts" in told(capsys)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert main(["eval", model, *call, "--prompts", str(empty)]) == 2
    assert str(empty) in told(capsys)
    # What it was tuned on is not what it is judged by.
    prompts = write_rows(tmp_path / "known.jsonl", [{"prompt": row["prompt"]} for row in read_rows(tuned / TRAIN_FILE)])
    assert main(["eval", str(tuned), *call, "--prompts", prompts]) == 2
    assert "no prompt is left" in told(capsys)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--prompts", "p.txt", "--task", "e2e"], "--task"),
        (["--self-tokens", "3"], "--max-new-tokens"),
    ],
)
def test_eval_without_references_refuses_what_needs_them(
    tuned: Path, tmp_path: Path, capsys: Any, more: list[str], named: str
) -> None:
    assert main(["eval", str(tuned), "--out", str(tmp_path / "eval"), *more]) == 2
    assert named in told(capsys)


def test_a_preparation_needs_no_data(model: str, tuned: Path, tmp_path: Path, capsys: Any) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(CostModel.of_step(8, 4, 0.0, 1.0).to_dict()))
    size = ["--self-temperature", "0.7", "--fit-rank", "2", "--test-records", "4", "--batch", "4", "--cost", str(cost)]
    call = ["prepare", model, "--minutes", "0", "--out", str(tmp_path / "ready"), *size]
    assert main([*call, *WORDS]) == 0
    printed = capsys.readouterr().out
    assert "time: own answers" in printed
    assert "perplexity against before" in printed
    before = (learned := tmp_path / "ready" / "answers" / TRAIN_FILE).read_bytes()
    learned.unlink()
    assert main([*call, *WORDS]) == 0
    assert "self.jsonl is gone" in capsys.readouterr().err
    assert learned.read_bytes() == before
    out = tmp_path / "ready" / "fit"
    assert (out / "skipdecode.fit").is_file()
    generate = ["generate", model, "hello", "--schedule", str(out / "schedule.json"), "--max-new-tokens", "4"]
    assert main(generate) == 0
    notes = capsys.readouterr().err
    assert "of rank" not in notes
    assert "copy of the head" not in notes
    assert "will be bad" not in notes
    assert main([*generate, "--debug"]) == 0
    assert "of rank 2" in capsys.readouterr().err
    assert main(call) == 2
    assert "--self" in capsys.readouterr().err
    # Full depth says the same with a fit, so its words serve a tuning that starts from one.
    on = tmp_path / "on"
    on.mkdir()
    for name in ("self.json", TRAIN_FILE, DEV_FILE):
        shutil.copy(tuned / name, on)
    fitted = ["--schedule", str(out / "schedule.json"), "--out", str(on)]
    assert main(["tune", model, *WORDS, *PACE, *fitted]) == 0
    assert words(on) == words(tuned)
    assert main(["tune", "--recipe", str(on / "recipe.json"), "--out", str(tmp_path / "none")]) == 2
    assert "started from a fit" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()  # told before anything is said
