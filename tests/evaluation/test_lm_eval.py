"""The model of lm-evaluation-harness, with the harness that `make test-slow` installs. Nothing leaves this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from string import ascii_letters

import pytest
import torch

from checkpoints import byte_tokenizer
from oracle import active_tokens, oracle_logits
from tiny import tiny_model

pytest.importorskip("lm_eval", reason="pip install 'skipdecode[conformance]'")
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from skipdecode.errors import UsageError
from skipdecode.lm_eval import SkipDecodeLM

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAIRS = [("hello", " you"), ("hello", " there"), ("hello ", "all"), ("", "one"), ("a b c d " * 5, " e"), ("hello", "!")]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a"}]
TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{options}}"},
    "written": {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of one token a byte, and two tasks."""
    path = tmp_path_factory.mktemp("lm-eval")
    byte_tokenizer().save_pretrained(path)
    tiny_model("llama", vocab_size=259).save_pretrained(path)
    rows = [{"question": f"q{i}:", "options": [" a", " bcd", " xy"], "answer": i % 3} for i in range(6)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    files["dataset_kwargs"] = {"data_files": {"test": f"{path}/rows.jsonl"}, "cache_dir": f"{path}/cache"}
    for name, task in TASKS.items():
        (path / f"{name}.yaml").write_text(json.dumps({"task": name} | files | task))
    return path


def model_of(folder, schedule, **options):
    return SkipDecodeLM(str(folder), schedule, dtype="float32", **{"batch_size": 3} | options)


def asked(kind, *rows):
    return [Instance(kind, {}, row, 0) for row in rows]


@torch.no_grad()
def oracle_score(lm, context: str, text: str):
    """The log-likelihood of a text after a context, and whether it is greedy, uncached."""
    prompt, new = lm.tokenizer(context or "<s>").input_ids, lm.tokenizer(text).input_ids
    ids = torch.tensor([prompt + new])
    active = active_tokens(lm.schedule, len(prompt), ids.shape[1])
    known = oracle_logits(lm.llm.loaded.model, ids, torch.ones_like(ids), active)[0].log_softmax(-1)
    rows = known[len(prompt) - 1 : -1]
    return float(rows[range(len(new)), new].sum()), rows.argmax(-1).tolist() == new


@pytest.mark.parametrize("engine", ["fast", "transformers"])
@pytest.mark.parametrize("schedule", ["2x", "3x:flat:p4"])
def test_log_likelihoods_are_those_of_the_schedule(folder, engine, schedule):
    lm = model_of(folder, schedule, engine=engine, max_gen_toks=8)
    new = lm.generate_until(asked("generate_until", *((letter, {"max_gen_toks": 1}) for letter in ascii_letters)))
    greedy = zip(ascii_letters, new, strict=True)
    pairs = [*PAIRS, next(pair for pair in greedy if pair[1].strip() and pair[1].isascii())]
    scores = lm.loglikelihood(asked("loglikelihood", *pairs))
    for (context, text), (score, is_greedy) in zip(pairs, scores, strict=True):
        wanted = oracle_score(lm, context.rstrip(), context[len(context.rstrip()) :] + text)
        assert (score, is_greedy) == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    assert scores[-1][1]
    for other in (model_of(folder, "full"), model_of(folder, schedule, max_gen_toks=8, quantization="w8a8")):
        assert scores != other.loglikelihood(asked("loglikelihood", *pairs))


def test_full_depth_is_their_own_class(folder, caplog):
    long = "a long text " * 9
    ours = model_of(folder, "full", max_length=64)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=3, max_length=64)
    pairs = asked("loglikelihood", *PAIRS, (long, " that is cut"))
    for mine, wanted in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert mine == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    texts = asked("loglikelihood_rolling", (long,), ("short",))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    options = [{"until": ["\n"], "max_gen_toks": 9}, {"until": ["e"], "do_sample": False, "max_gen_toks": 4}]
    prompts = asked("generate_until", *((text, each) for text in ("hello", "ab", long) for each in options))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)
    for answer in (True, False):
        assert ours.apply_chat_template(CHAT, answer) == theirs.apply_chat_template(CHAT, answer)
    assert caplog.text.count("said once") == 1


def test_tasks_of_files_on_the_command_line(folder, tmp_path):
    args = ["--model_args", f"pretrained={folder},schedule=2x,dtype=float32", "--include_path", str(folder)]
    args += ["--tasks", "choice,written", "--apply_chat_template", "--log_samples", "--output_path", str(tmp_path)]
    command = [sys.executable, "-m", "skipdecode.lm_eval", "--model", "skipdecode", "--batch_size", "auto"]
    subprocess.run([*command, *args], check=True)
    read = {name: [json.loads(line) for line in next(tmp_path.rglob(f"*_{name}_*.jsonl")).open()] for name in TASKS}
    lm = model_of(folder, "2x")
    for sample in read["choice"]:
        scores = [float(score) for ((score, _),) in sample["resps"]]
        assert scores[0] == pytest.approx(oracle_score(lm, *sample["arguments"]["gen_args_0"].values())[0], abs=1e-4)
        assert sample["acc"] == float(scores.index(max(scores)) == sample["doc"]["answer"])
    chats = [f"<user>q{i}:<assistant>" for i in range(6)]
    outputs = lm.llm.generate(chats, 8, schedule=lm.schedule, stop="\n", template=False)
    assert [sample["resps"] for sample in read["written"]] == [[[output.text]] for output in outputs]
    assert json.loads(next(tmp_path.rglob("results_*.json")).read_text())["config"]["skipdecode"]["engine"] == "fast"


def test_kept_responses_of_another_schedule_are_refused(folder, tmp_path):
    cache = str(tmp_path / "responses.db")
    request = asked("generate_until", ("q1:", {"until": ["\n"], "max_gen_toks": 8}))
    assert CachingLM(model_of(folder, "2x"), cache).generate_until(request)
    with pytest.raises(UsageError, match="another model or schedule"):
        CachingLM(model_of(folder, "full"), cache)
    CachingLM(model_of(folder, "2x"), cache)
