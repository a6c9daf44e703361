"""Speed of the skinny GEMM: GB/s of weights against F.linear and a large read, on this machine.

    python benchmarks/kernel.py [--threads 2] [--seconds 1]

Alternates all candidates over weights larger than the caches and prints medians; one JSON document goes to the file
that `--json` names. On a shared machine the read at the top and at the bottom tells how quiet it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch.nn import functional

from skipdecode.common.kinds import heading
from skipdecode.common.stopwatch import Stopwatch, timed
from skipdecode.engine.kernels import native_kernels
from skipdecode.engine.kernels.spec import LinearSpec

SHAPES = {
    "SmolLM2-135M qkv": (960, 576),
    "SmolLM2-135M gate+up": (3072, 576),
    "SmolLM2-135M head": (49152, 576),
    "OPT-1.3B qkv": (6144, 2048),
    "OPT-1.3B fc2": (2048, 8192),
}
WORKING_SET = 150 * 2**20  # bytes of weights in turn: well beyond the last cache


def read_bandwidth() -> float:
    """GB/s of a large sum, the median of 5."""
    data = torch.ones(32 * 2**20, dtype=torch.int64)
    times = [timed(data.sum) for _ in range(5)]
    return data.nbytes / statistics.median(times) / 1e9


def measure(shape: tuple[int, int], rows: int, dtype: torch.dtype, budget: float) -> dict[str, float]:
    """Median GB/s of weights of each candidate, in alternation for about `budget` seconds."""
    out, columns = shape
    count = max(2, WORKING_SET // (out * columns * dtype.itemsize))
    weights = [torch.full(shape, 0.01, dtype=dtype) for _ in range(count)]
    x, y = torch.randn(rows, columns), torch.empty(rows, out)
    narrow = x.to(dtype)
    kernels, reason = native_kernels(torch.device("cpu"), dtype)
    if kernels is None:
        raise SystemExit(reason)
    calls = [kernels.linear(LinearSpec(w)) for w in weights]

    def ours() -> None:
        for call in calls:
            call(x, y, rows, False)

    def torchs() -> None:
        for w in weights:
            functional.linear(narrow, w)

    candidates = {"skipdecode (native)": ours, "F.linear": torchs}
    watch = Stopwatch[str, float](candidates)
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(watch.laps("F.linear")) < 3:
        watch.lap(lambda name: timed(candidates[name]))
    size = count * weights[0].nbytes
    return {name: size / watch.seconds(name, float) / 1e9 for name in candidates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape, batch and type")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    before = read_bandwidth()
    print(f"read {before:.1f} GB/s, {args.threads} threads")
    table = []
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for name, shape in SHAPES.items():
                for rows in args.rows:
                    result = measure(shape, rows, dtype, args.seconds)
                    table.append({"weights": name, "dtype": str(dtype)[6:], "rows": rows, "gb_per_s": result})
                    figures = "  ".join(f"{k} {v:5.1f}" for k, v in result.items())
                    flops = next(iter(result.values())) * rows * 2 / dtype.itemsize
                    print(f"{str(dtype)[6:]:9} {name:22} rows {rows:2}: {figures}  ({flops:.0f} GFLOP/s)", flush=True)
    after = read_bandwidth()
    print(f"read {after:.1f} GB/s")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            document = heading("benchmark", "kernel-speed") | {
                "threads": args.threads,
                "read_gb_per_s": [before, after],
            }
            json.dump(document | {"rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
