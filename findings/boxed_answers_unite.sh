#!/usr/bin/env bash
# Guess: of several boxed answers the last one counts, however far it is from the others; a boxed or LaTeX final answer is preferred to a number in prose.
# Instead: math-verify unites boxed answers that are near each other into a set, so a model that corrects itself at once is wrong with {1, 2}, and right if it writes a longer text in between. A number in a later sentence replaces
# a final answer in LaTeX.
# Matters to: whoever scores or rewards mathematics: accuracy then depends on how long a model talks between two answers, so a shorter or faster model is scored by another rule.
# Versions: math-verify 0.9.0.
# Users should: cut the output down to the last \boxed{} themselves, or to the text after the last "answer" that they asked for, before they call parse.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'math-verify[antlr4_13_2]==0.9.0'
venv/bin/python - <<'PY'
from importlib.metadata import version

from math_verify import parse, verify

print("math-verify", version("math-verify"))
near = r"\boxed{1}" "\n\nWait, let me check.\n\n" r"Final answer: \boxed{2}"
far = r"\boxed{1}" "\n\nWait, let me check. In the third line I added instead of multiplying, so I do it again.\n\n" r"Final answer: \boxed{2}"
prose = r"Final answer: $\frac{1}{2}$. (There are 6 cases in total.)"
plain = r"Final answer: $\frac{1}{2}$."
right = {}
for name, output, gold in (("near", near, "$2$"), ("far", far, "$2$"), ("prose", prose, r"$\frac{1}{2}$"), ("plain", plain, r"$\frac{1}{2}$")):
    found = parse(output)
    right[name] = verify(parse(gold), found)
    print(f"{output!r}: read as {found[0]}, right for {gold}: {right[name]}")
assert right == {"near": False, "far": True, "prose": False, "plain": True}, "the behaviour has changed"
PY
