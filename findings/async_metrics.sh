#!/usr/bin/env bash
# Guess: the decorators time(), track_inprogress() and count_exceptions() work on an async function, or refuse it.
# Instead: they measure the making of the coroutine. The time is microseconds, nothing is in progress, and no exception is counted. The same objects as `with` blocks inside the function are right.
# Versions: prometheus_client 0.26.0.
# Users should: write `with HISTOGRAM.time():` inside an async handler instead of the decorator.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'prometheus_client==0.26.0'
venv/bin/python - <<'EOF'
import asyncio
import contextlib
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

print("prometheus_client", version("prometheus_client"))
registry = CollectorRegistry()
seconds, running, failed = Histogram("seconds", "-", registry=registry), Gauge("running", "-", registry=registry), Counter("failed", "-", registry=registry)
during = []


async def work():
    await asyncio.sleep(0.2)
    during.append(registry.get_sample_value("running"))
    raise ValueError


@failed.count_exceptions()
@running.track_inprogress()
@seconds.time()
async def decorated():
    await work()


async def inside():
    with failed.count_exceptions(), running.track_inprogress(), seconds.time():
        await work()


for handler in (decorated, inside):
    with contextlib.suppress(ValueError):
        asyncio.run(handler())
    seen = during[-1], registry.get_sample_value("seconds_sum"), registry.get_sample_value("failed_total")
    print(f"{handler.__name__}: in progress {seen[0]}, seconds {seen[1]:.6f}, exceptions {seen[2]}")
    right = seen[0] == 1 and seen[1] > 0.1 and seen[2] == 1
    assert right == (handler is inside), "the behaviour has changed"
EOF
