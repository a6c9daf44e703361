"""Make a model fast, compare schedules, generate and export, in Python.

python examples/in_python.py MODEL train.jsonl dev.jsonl OUT
"""

import sys

import skipdecode as sd


def main(model: str, train: str, dev: str, out: str, minutes: float = 10, speedup: float = 1.3) -> None:
    """Records have the fields "prompt" and "response"."""
    llm = sd.LLM(model)
    fields = {"prompt_field": "prompt", "response_field": "response"}
    ready = sd.prepare(llm, train, dev, target_speedup=speedup, minutes=minutes, out=f"{out}/ready", **fields)
    print(ready)
    print(sd.evaluate(ready.llm, dev, ["full", ready.schedule]))
    print(ready.llm.generate("Say hello.", max_new_tokens=16)[0].text)
    print(sd.export(llm, f"{out}/small", "1.5x:flat:pmax_exit"))


if __name__ == "__main__":
    main(*sys.argv[1:5])
