"""Prompts for code, without HumanEval: signatures and docstrings of the standard library's functions.

python benchmarks/code_prompts.py runs/code.jsonl
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from pathlib import Path

from humaneval import ASK


def main() -> None:
    """Write the file of prompts that the first argument names."""
    prompts = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.decorator_list:
                continue
            first = node.args.args[0].arg if node.args.args else ""
            if first == "self" or len(ast.get_docstring(node) or "") < 60:
                continue
            node.body = node.body[:1]  # the docstring
            if len(text := ast.unparse(node) + "\n") < 1500:
                prompts[node.name] = ASK.format(prompt=text)
    lines = [json.dumps({"prompt": prompts[name]}) + "\n" for name in sorted(prompts)]
    Path(sys.argv[1]).write_text("".join(lines))
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
