"""`skipdecode chat`: turns and commands from a pipe, and a session on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skipdecode import LLM, Schedule
from skipdecode.cli import main
from textgen_tools import command, save_tiny_model, stdin_of, subprocess_environment
from tiny import LAYERS

CONTEXT = 200


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: Any, model_dir: str) -> Any:
    def session(lines: str | bytes, *options: str, code: int = 0) -> tuple[list[str], str]:
        """What is printed on standard output, by line of input, and on standard error."""
        stdin_of(monkeypatch, lines)
        assert main(["chat", model_dir, "--max-new-tokens", "8", *options]) == code
        return capsys.readouterr()

    return session


def answers(llm: LLM, *turns: str, system: str | None = None, **options: Any) -> str:
    """What a chat of these turns prints."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    printed = ""
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        (out,) = llm.generate([messages], 8, **options)
        messages.append({"role": "assistant", "content": out.text})
        printed += out.text + "\n"
    return printed


@pytest.fixture(scope="module")
def llm(model_dir: str) -> LLM:
    return LLM(model_dir, device="cpu")


def test_a_line_that_is_no_utf8_is_left_out_and_the_chat_goes_on(talk: Any, llm: LLM):
    out, told = talk(b"hello\n\xff\nand you\n")
    assert out == answers(llm, "hello", "and you")
    assert "line 2 is skipped: not UTF-8: byte 1 of the line" in told


def test_lines_are_turns_of_one_chat(talk: Any, llm: LLM):
    out, told = talk("hello\n\nand you\n")
    assert out == answers(llm, "hello", "and you")
    assert "full depth" in told
    assert talk("hello\n/reset\nhello")[0] == answers(llm, "hello") * 2
    assert talk("hello\n/quit\nand you\n")[0] == answers(llm, "hello")
    sampled = {"temperature": 1.0, "top_k": 9, "seed": 4}
    options = ("--temperature", "1", "--top-k", "9", "--seed", "4")
    assert talk("hello\nmore\n", *options)[0] == answers(llm, "hello", "more", **sampled)


def test_the_schedule_is_switched_between_turns(talk: Any, llm: LLM, tmp_path: Path):
    own = Schedule.even(LAYERS, (6, 5, 4), name="mine")
    own.save(tmp_path / "own.json")
    full, fast, even = (answers(llm, "hello", schedule=s) for s in ("full", "2x", own))
    assert len({full, fast, even}) == 3
    lines = f"hello\n/reset\n/2x\nhello\n/reset\n/full\nhello\n/reset\n/schedule {tmp_path / 'own.json'}\nhello\n"
    assert talk(lines)[0] == full + fast + full + even
    assert talk("hello\n", "--schedule", "2x")[0] == fast
    shallow = Schedule.from_speedup(LAYERS, 2, 8).with_prompt((0, 1, 2))
    assert talk("/2x:p3\nhello\n")[0] == answers(llm, "hello", schedule=shallow) != fast
    _, told = talk("/2x\nhello\nmore\n/schedule\n")
    assert told.count("not tuned under skipdecode-2x") == 1
    assert "skipdecode-2x; others: full" in told


def test_the_system_message_can_be_set(talk: Any, llm: LLM):
    expected = answers(llm, "hi", system="be kind")
    assert expected != answers(llm, "hi")
    assert talk("hi\n", "--system", "be kind")[0] == talk("/system be kind\nhi\n")[0] == expected
    assert talk("/system\nhi\n", "--system", "be kind")[0] == answers(llm, "hi")


def test_what_cannot_be_done_is_a_line_and_the_session_goes_on(talk: Any, llm: LLM):
    out, told = talk(f"/faster\n/99x\n/schedule absent\n{'x' * CONTEXT}\nhello\n", code=1)
    assert out == answers(llm, "hello")
    said = [line for line in told.splitlines() if line.startswith("skipdecode: ")][-4:]
    for line, part in zip(said, ("/faster", "speed-up of 99", "unknown schedule 'absent'", "no room"), strict=True):
        assert part in line


def test_a_full_context_forgets_the_oldest_turns_and_says_so(talk: Any):
    turn = "word " * 10
    out, told = talk(f"{turn}\n" * 5)
    assert len(out.encode("utf-8", "ignore")) > 0
    assert told.count("the oldest turn is dropped") >= 2


def test_a_model_without_chat_template_says_what_to_use(capsys: Any, tmp_path: Path):
    assert main(["chat", save_tiny_model(tmp_path, chat=False)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "skipdecode generate" in last
    assert "smollm2-135m" in last


class Terminal:
    """A session on a pseudo-terminal, in a child of this process."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            # A program of its own: threads that this process has made are not there after a fork.
            os.execve(sys.executable, command("chat", *arguments), subprocess_environment() | {"TERM": "dumb"})

    def read(self, end: str) -> str:
        """What is shown up to `end`."""
        seen, until = b"", time.monotonic() + 120
        while not re.search(end, seen.decode("utf-8", "replace")):
            if not select.select([self.fd], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(f"no {end!r} in {seen!r}")
            seen += os.read(self.fd, 4096)
        return seen.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


@pytest.mark.slow
def test_a_terminal_shows_figures_and_ctrl_c_stops_the_answer_alone(tmp_path: Path):
    session = Terminal(save_tiny_model(tmp_path, context=20_000), "--max-new-tokens", "19000")
    session.read("> $")
    session.type("hello\n")
    session.read("hello\r\n.*[^\r\n]{20}")
    session.type("\x03")
    shown = session.read("> $")
    assert re.search(rf"[\d.]+ tokens/s, {LAYERS}\.0 of {LAYERS} layers, first token after [\d.]+ s", shown)
    session.type("/2x\n")
    assert "skipdecode-2x" in session.read("> $")
    time.sleep(1)  # `input` sees a signal only once it waits for a key
    session.type("\x03")
    session.read("> $")
    session.type("\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(session.pid, 0)[1]) == 0
