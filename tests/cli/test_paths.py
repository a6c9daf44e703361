"""Nothing that a command reads is written, nothing is written twice, and what a verb did not write stays as it is."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from counted import count_time
from eval_tools import arguments as eval_arguments
from eval_tools import prepare
from skipdecode import Schedule
from skipdecode.cli import VERBS, main
from skipdecode.common.files import RunDirectory
from skipdecode.common.options import Reads, Writes, kinds
from skipdecode.common.resume import ResumeLog
from skipdecode.errors import WriteError
from skipdecode.models.loading.saving import save_tokenizer
from textgen_tools import read_rows, save_tiny_model, small_disk

# Of each verb with an output, commands in which two options name one path, and what is there.
SAME_PATH = [
    ("plan model --schedule {} --out {}", "s.json"),
    ("generate model --input {} --output {}", "a.jsonl"),
    ("generate {} --input a.jsonl --output {}", "model"),
    ("tune model --train a.jsonl --dev {} --task t.yaml --schedule 2x --out {}", "d.jsonl"),
    ("prepare model --train {} --dev d.jsonl --task t.yaml --out {}", "a.jsonl"),
    ("eval model --task t.yaml --data {} --out {}", "a.jsonl"),
    ("export {} --out {}", "model"),
]


def config_of(verb: str) -> type:
    found: type = importlib.import_module(f"skipdecode.cli.{verb}").Config
    return found


def paths_of(verb: str, *uses: type) -> list[str]:
    return [name for name, kind in kinds(config_of(verb)).items() if isinstance(kind.metadata["path"], uses)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("paths")
    save_tiny_model(place / "model")
    rows = "".join(json.dumps({"id": i, "mr": f"name[{i}]", "ref": "a b", "prompt": "a"}) + "\n" for i in range(4))
    for name in ("a.jsonl", "d.jsonl"):
        (place / name).write_text(rows)
    (place / "t.yaml").write_text("name: mine\nprompt: '{mr}'\nreferences: [ref]\nmetrics: [bleu]\nmax_new_tokens: 4\n")
    (place / "s.json").write_text(Schedule.constant(8, 5).to_json())
    return place


@pytest.fixture
def place(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def content(place: Path) -> dict[str, bytes | str]:
    """All that is there, by name, but model cards, which have the command."""
    return {
        str(p.relative_to(place)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else b""
        for p in sorted(place.rglob("*"))
        if p.name != "README.md"
    }


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_that_names_a_file_says_what_it_does_with_it(verb: str):
    words = re.compile(
        r"^(a )?(files?|directory|JSON lines|JSONL|result files|schedule files?)\b|YAML file|\\*.json|hub id"
    )
    named = {name for name, kind in kinds(config_of(verb)).items() if words.search(kind.metadata["help"])}
    no_paths = {"bertscore_model", "format", "samples", "generation_config"}
    assert named - no_paths <= set(paths_of(verb, Reads, Writes, RunDirectory))


@pytest.mark.parametrize(("command", "name"), SAME_PATH)
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_options_of_one_path_are_refused(command: str, name: str, overwrite: bool, place: Path, capsys: Any):
    link = Path("link").with_suffix(Path(name).suffix)
    link.symlink_to(name)
    before = content(place)
    for other in (name, f"./{name}", str(place / name), f"../here/{name}", str(link)):
        for first, second in ((name, other), (other, name)):
            assert main([*command.format(first, second).split(), *["--overwrite"] * overwrite]) == 2
            told = capsys.readouterr().err
            assert told.count("\n") == 1
            assert first in told or second in told
    assert content(place) == before


def test_two_new_outputs_of_one_name_are_refused(place: Path, capsys: Any):
    before = content(place)
    for first, second in permutations(("new", "./new", "new/../new", str(place / "new")), 2):
        assert main(["generate", "model", "--input", "a.jsonl", "--output", first, "--summary", second]) == 2
        assert "are the same" in capsys.readouterr().err
        assert content(place) == before


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("generate model --input a.jsonl --output o.jsonl --summary o.jsonl.partial", "--summary o.jsonl.partial"),
        ("generate model --input o.jsonl.partial --output o.jsonl", "--input o.jsonl.partial"),
        ("generate model --output fifo --input fifo", "--input fifo and --output fifo are the same"),
        ("plan model --schedule 2x --out s.json", "s.json exists: give --overwrite"),
        ("plan model --schedule 2x --out circle", "link is circular"),
        ("plan model --schedule 2x --out new/", "it is a directory"),
        ("eval model --task t.yaml --data a.jsonl --out foreign", "holds no run of skipdecode eval (outputs.jsonl"),
        ("eval model --task t.yaml --data a.jsonl --out other", "other holds a model"),
        ("eval model --task t.yaml --data a.jsonl --out other --overwrite", "other holds a model"),
        ("tune model --train a.jsonl --dev d.jsonl --task t.yaml --out model --overwrite", "MODEL model"),
        ("tune model --train a.jsonl --dev d.jsonl --task t.yaml --out other --overwrite", "other holds a model"),
        ("tune model --train a.jsonl --dev d.jsonl --task t.yaml --out foreign", "holds no run"),
        ("tune model --full --train a.jsonl --dev d.jsonl --task t.yaml --out dir", "MODEL model"),
        ("tune adapter --merge --train a.jsonl --dev d.jsonl --task t.yaml --out model", "MODEL adapter"),
    ],
)
def test_what_would_be_lost_is_refused(command: str, named: str, place: Path, capsys: Any):
    shutil.copytree("model", "other")
    for folder in ("run0", "foreign"):
        Path(folder).mkdir()
        Path(folder, "outputs.jsonl").write_text("{}\n")
    Path("run0/run.json").write_text('{"kind": "evaluation", "format": 1}')
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(place / "model")}))
    Path("dir").symlink_to("model")
    Path("circle").symlink_to("circle")
    os.mkfifo("fifo")
    before = content(place)
    assert main(command.split()) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1
    assert content(place) == before


def test_outputs_in_what_is_read_that_replace_nothing_are_written(place: Path, monkeypatch: pytest.MonkeyPatch):
    count_time(monkeypatch)
    assert main(["plan", "model", "--schedule", "2x", "--out", "model/schedule.json"]) == 0


# ---------------------------------------------------------------------- streams and links


def test_links_stay_and_what_they_name_is_written(place: Path):
    Path("real").mkdir()
    Path("link.json").symlink_to("real/new.json")
    Path("link.jsonl").symlink_to("real/rows.jsonl")
    command = ["generate", "model", "x", "--max-new-tokens", "2", "--output", "link.jsonl", "--summary", "link.json"]
    assert main(command) == 0
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0
    assert Path("link.json").is_symlink()
    assert Path("link.jsonl").is_symlink()
    assert json.loads(Path("real/new.json").read_text())["summary"]["rows"] == 1
    assert len(read_rows(Path("real/rows.jsonl"))) == 1
    assert sorted(os.listdir("real")) == ["new.json", "rows.jsonl"]


@pytest.mark.slow
def test_devices_pipes_and_open_files_are_written_as_they_are(place: Path):
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    Path("log").write_text("begun\n")
    Path("out").symlink_to("/dev/stdout")
    plain = "generate model x --max-new-tokens 2"
    commands = [f"{plain} --output /dev/stdout --summary /dev/null", f"{plain} --output out --summary pipe"]
    code = f"from skipdecode.cli import main\nassert not any([main(one.split()) for one in {commands}])"
    with open("log", "a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, stderr=subprocess.DEVNULL, check=True)
    reader.join(10)
    assert json.loads(read[0])["summary"]["rows"] == 1
    first, *rows = Path("log").read_text().splitlines()
    assert first == "begun"
    assert [json.loads(row)["id"] for row in rows] == [1, 1]
    assert Path("/dev/null").is_char_device()
    assert Path("out").is_symlink()
    assert not Path("/dev/stdout.partial").exists()
    # What is read is not appended to.
    words = ["generate", "model", "--input", "a.jsonl", "--output", "/dev/stdout"]
    with open("a.jsonl", "a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "skipdecode", *words], stdout=log, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert "are the same" in done.stderr


# ---------------------------------------------------------------------- runs


@pytest.mark.slow
def test_one_run_at_a_time_writes_to_a_directory(place: Path, capsys: Any):
    words = "--train a.jsonl --dev d.jsonl --task t.yaml --schedule 2x --steps 4000 --batch-size 2 --full --out run"
    command = ["tune", "model", *words.split(), "--precision", "fp32"]
    first = subprocess.Popen([sys.executable, "-m", "skipdecode", *command], stderr=subprocess.DEVNULL)
    try:
        log = place / "run" / "log.jsonl"
        until = time.monotonic() + 120
        while not (log.is_file() and len(log.read_text().splitlines()) > 2):
            assert time.monotonic() < until
            assert first.poll() is None
            time.sleep(0.05)
        assert main(command) == 2
        told = capsys.readouterr().err
        assert told == "skipdecode: run is being written by another run: wait for it, or give another output\n"
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    # What a kill leaves does not lock anybody out.
    assert main([*command, "--learning-rate", "0.5"]) == 2
    assert "options.learning_rate" in capsys.readouterr().err
    assert not list(place.glob("run/.*"))


def test_a_refused_command_leaves_no_directory(place: Path, capsys: Any):
    before = content(place)
    assert (
        main(["tune", "model", "--train", "none.jsonl", "--dev", "d.jsonl", "--task", "t.yaml", "--out", "new/deep"])
        == 2
    )
    assert main(["eval", "model", "--task", "t.yaml", "--data", "none.jsonl", "--out", "new/deep"]) == 2
    assert content(place) == before


def test_a_finished_run_beside_an_unfinished_one_stays(tmp_path: Path, capsys: Any):
    prepare(tmp_path)
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("a b c\nb c d\n")
    own = ["eval", str(tmp_path / "model"), "--prompts", str(prompts), "--methods", "2x"]
    own += ["--max-new-tokens", "4", "--out", str(out)]
    assert main(own) == 0
    unfinished = out / "unfinished.sqlite"
    with closing(ResumeLog(unfinished, {"data": "0"}, what="", remedy="")) as log:
        log.put("batch 0", [])
    for told, more in (("give --overwrite", ()), ("move it away", ("--overwrite",))):
        for command in (own, eval_arguments(tmp_path, "--out", str(out), "--schedule", "full")):
            before = content(out)
            assert main([*command, *more]) == 2
            assert told in capsys.readouterr().err.splitlines()[-1]
            assert {n: c for n, c in content(out).items() if n != "self.json"} == before
        unfinished.write_text("not of ours\n")  # which stays, whatever is given
    unfinished.unlink()
    assert main([*own, "--overwrite"]) == 0


def test_a_place_of_a_method_that_eval_did_not_write_stays(tmp_path: Path, capsys: Any):
    prepare(tmp_path)
    out = tmp_path / "out"
    first = eval_arguments(
        tmp_path, "--out", str(out), "--limit", "2", "--no-teacher-forced", "--schedule", "full", "2x"
    )
    assert main(first) == 0
    (out / "skipdecode-1.5x").mkdir()
    (out / "skipdecode-1.5x" / "outputs.jsonl").write_text("mine\n")
    second = [*first[:-1], "1.5x"]
    before = content(out)
    assert main(second) == 2
    assert "holds no run" in capsys.readouterr().err
    assert content(out) == before
    shutil.move(out / "skipdecode-1.5x", tmp_path)
    assert main([*second, "--overwrite"]) == 0


# ---------------------------------------------------------------------- kills and full disks

# Exports, and is killed when its second file has come into the output directory.
KILLED = """
import os, signal, sys
from skipdecode.cli import main
replace, moved = os.replace, []
def counted(source, target):
    replace(source, target)
    moved.append(target) if os.path.dirname(target) == "run" else None
    if len(moved) == 2: os.kill(os.getpid(), signal.SIGKILL)
os.replace = counted
main(["export", "model", "--out", "run"])
"""


def test_an_export_that_was_killed_is_begun_again(place: Path, capsys: Any):
    assert subprocess.run([sys.executable, "-c", KILLED], capture_output=True).returncode == -signal.SIGKILL
    left = content(place / "run")
    assert len(left) > 3
    assert "config.json" not in left
    assert main(["export", "model", "--out", "run"]) == 0
    again = content(place / "run")
    assert main(["export", "model", "--out", "new"]) == 0
    assert again == content(place / "new")
    # Killed before a file was whole, and a file of somebody else.
    (place / "other" / next(name for name in left if name.startswith("."))).mkdir(parents=True)
    assert main(["export", "model", "--out", "other"]) == 0
    assert content(place / "other") == again
    (place / "full").mkdir()
    (place / "full" / "notes.txt").write_text("mine")
    assert main(["export", "model", "--out", "full"]) == 2
    assert "notes.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "file", "size"),
    [
        ("export model --out run", "run/model.safetensors", 60_000),
        ("export model --format gguf --out run", "run/model-f16.gguf", 60_000),
        ("tune model --full", "run/checkpoints/best/model.safetensors", 60_000),
        ("tune model", "run/checkpoints/step-000001", 400_000),
    ],
)
def test_a_full_disk_is_one_line(command: str, file: str, size: int, place: Path, capsys: Any):
    pytest.importorskip("gguf")
    words = command.split()
    if words[0] == "tune":
        more = "--out run --schedule 2x --steps 2 --batch-size 2 --precision fp32"
        words += f"--train a.jsonl --dev d.jsonl --task t.yaml {more} --checkpoint-every 1".split()
    with small_disk(size):
        assert main(words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"skipdecode: cannot write {file}: ")
    assert "are free" in last
    assert ("are needed" in last) == file.endswith(".safetensors")
    assert not (place / "run" / "config.json").exists()


def test_a_tokenizer_on_a_full_disk_is_named(tmp_path: Path):
    with small_disk(2_000), pytest.raises(WriteError, match=r"shown/tokenizer\.json: .* are free"):
        save_tokenizer(byte_tokenizer(), tmp_path / "partial", shown=tmp_path / "shown")


ELSEWHERE = """
import os, pkgutil, importlib, sys
for name in "fcntl pwd grp termios tty pty readline syslog uvloop".split():  # torch needs `resource` on Linux
    sys.modules[name] = None
for name in "sched_getaffinity geteuid getloadavg statvfs mkfifo".split():
    vars(os).pop(name, None)
import skipdecode.generation.llm
for module in pkgutil.walk_packages(skipdecode.__path__, "skipdecode."):
    if not module.name.startswith(("skipdecode.vllm", "skipdecode.lm_eval")) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from contextlib import closing
from pathlib import Path
from skipdecode.cli import main
from skipdecode.common.files import Lock
os.mkdir("run")
with closing(Lock(Path("run/.skipdecode.lock"), Path("run"))):
    assert main(["export", "model", "--out", "run"]) == 2
with closing(Lock(Path(".o.jsonl.partial.lock"), Path("run"))):
    assert main("generate model --input a.jsonl --output o.jsonl --max-new-tokens 2".split()) == 2
assert main(["export", "model", "--out", "run"]) == 0
assert main("generate model --input a.jsonl --output o.jsonl --max-new-tokens 2".split()) == 0
"""


def test_the_package_works_where_modules_of_unix_are_absent(place: Path):
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is being written by another run") == 2
    assert len(read_rows(place / "o.jsonl")) == 4
    assert not [name for name in content(place) if "lock" in name or "partial" in name]
