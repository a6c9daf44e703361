"""One modelled engine of the simulator: the engine's loop over sizes instead of tensors. Pure Python.

Mirrors `Engine.step`: admit through the same `Scheduler`, run prompts in forwards of bounded size, decode. Steps
between which nothing changes (no row's budget, no end, no arrival) are one *stretch*: their times are an arithmetic
series, because the cache that they read grows evenly, so any number of them is one event.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from skipdecode.engine.depth import BudgetPolicy, RowView
from skipdecode.engine.scheduler import RequestSize, Scheduler
from skipdecode.errors import ScheduleError
from skipdecode.performance.batch_cost import StepCost
from skipdecode.performance.simulate.totals import Totals
from skipdecode.performance.simulate.traces import Arrival
from skipdecode.schedule import Schedule

__all__ = ["Worker"]


class _Row:
    """An admitted request. While it decodes, it reads `reads` + `slope` · clock cached tokens in each of its layers."""

    __slots__ = ("admitted", "arrival", "budget", "end", "joined", "left", "number", "reads", "slope")

    def __init__(self, number: int, arrival: Arrival, admitted: float) -> None:
        self.number = number
        self.admitted = admitted
        self.arrival = arrival
        self.left = arrival.prompt_tokens
        self.joined = self.end = self.budget = 0
        self.reads = self.slope = 0.0


class Worker:
    """A modelled engine.

    Parameters
    ----------
    cost : StepCost
    budgets : Schedule or BudgetPolicy
        A policy is asked for every row and token, which makes every step an event.
    scheduler : Scheduler
        Of this worker alone.
    totals : Totals
        Where it adds up; may be shared.
    prompt_chunk : int
        Most prompt tokens of one forward.
    """

    def __init__(
        self,
        cost: StepCost,
        budgets: Schedule | BudgetPolicy,
        scheduler: Scheduler,
        totals: Totals,
        prompt_chunk: int,
    ) -> None:
        self._cost, self._scheduler, self._totals, self._chunk = cost, scheduler, totals, prompt_chunk
        if isinstance(budgets, Schedule):
            self._policy: BudgetPolicy | None = None
            self._prompt_budget = len(budgets.prompt_layers())
            self._changes = _changes(budgets)
        else:
            self._policy = budgets
            self._prompt_budget = budgets.prompt_budget()
            self._changes = ()
        self.end: float | None = None  # when the forward or stretch under way ends; None: idle
        self._new: list[RequestSize] = []
        self._arrivals: dict[int, Arrival] = {}
        self._starting: list[_Row] = []
        self._running: dict[int, _Row] = {}
        self._clock = 0  # decode steps done
        self._due: list[tuple[int, int, int]] = []  # (clock, request, change or -1): what happens to running rows
        self._levels: dict[int, list[float]] = {}  # by budget: rows, and the sums of their reads and slopes
        self._began = self._last = 0.0
        self._fresh: list[tuple[float, int]] = []  # rows that have not decoded: time of their first token, how many
        self._steps = 0  # of the stretch under way; 0: prompts run
        self._line = (0.0, 0.0)
        self._prompts: list[_Row] = []
        self._prompt_load = 0

    # ------------------------------------------------------------------ what the simulator calls

    def submit(self, number: int, arrival: Arrival) -> bool:
        """Take a request; returns whether `end` has changed."""
        self._arrivals[number] = arrival
        self._new.append(RequestSize(arrival.limit, arrival.prompt_tokens, number))
        if self.end is None:
            self.end = arrival.seconds  # wakes up once all that arrive now are here
            return True
        if self._steps <= 1 or arrival.seconds >= self.end:
            return False
        # The step under way ends, then the request may join: cut the stretch there.
        steps = _steps_until(arrival.seconds - self._began, *self._line, self._steps)
        if steps == self._steps:
            return False
        self._steps = steps
        self.end = self._began + _sum(*self._line, steps)
        return True

    def advance(self) -> int:
        """Go past `end`; returns the number of requests that have finished."""
        now = self.end or 0.0
        before = self._totals.finished
        if self._prompts:
            self._finish_prompts(now)
        elif self._steps:
            self._finish_stretch(now)
            self._next(now)
        else:
            self._next(now)
        return self._totals.finished - before

    # ------------------------------------------------------------------ what happens next

    def _next(self, now: float) -> None:
        if self._new:
            self._scheduler.submit(self._new)
            self._new = []
        for size in self._scheduler.admit(len(self._starting) + len(self._running)):
            self._starting.append(_Row(size.request, self._arrivals.pop(size.request), now))
        self._steps = 0
        if self._starting:
            self._start_prompts(now)
        elif self._running:
            self._start_stretch(now, math.inf)
        else:
            self.end = None

    def _start_prompts(self, now: float) -> None:
        room, self._prompts = self._chunk, []
        for row in self._starting:
            part = min(row.left, room)
            if not part:
                break
            row.left -= part
            room -= part
            self._prompts.append(row)
        self._prompt_load = self._chunk - room
        self._began = now
        self.end = now + self._cost.prompt_seconds(self._prompt_load, self._prompt_budget)

    def _finish_prompts(self, now: float) -> None:
        totals = self._totals
        totals.prompt_tokens += self._prompt_load
        totals.prompt_seconds += now - self._began
        done = [row for row in self._prompts if not row.left]
        self._prompts = []
        del self._starting[: len(done)]
        totals.new_tokens += len(done)
        joined = 0
        for row in done:
            totals.first_token.add(now - row.arrival.seconds)
            if row.arrival.new_tokens == 1:
                self._finish(row, now)
            else:
                self._join(row)
                joined += 1
        if joined:
            self._fresh.append((now, joined))
        if self._starting and not self._running:
            self._start_prompts(now)
        elif not self._running or (done and self._starting):
            self._next(now)
        else:
            self._start_stretch(now, 1)

    # ------------------------------------------------------------------ rows

    def _join(self, row: _Row) -> None:
        row.joined, row.end = self._clock, self._clock + row.arrival.new_tokens - 1
        self._running[row.number] = row
        heapq.heappush(self._due, (row.end, row.number, -1))
        if self._policy is None:
            row.budget = self._changes[0][1]
            self._push_change(row, 1)
        else:
            row.budget = self._prompt_budget
        row.reads, row.slope = row.arrival.prompt_tokens + 1 - row.joined, 1.0
        window = self._cost.window
        if self._cost.window_share and window:
            kink = self._clock + window - row.arrival.prompt_tokens - 1
            if kink <= self._clock:
                self._pass_window(row)
            elif kink < row.end:
                heapq.heappush(self._due, (kink, row.number, -2))
        self._count(row, 1)

    def _push_change(self, row: _Row, change: int) -> None:
        if change < len(self._changes) and (clock := row.joined + self._changes[change][0]) < row.end:
            heapq.heappush(self._due, (clock, row.number, change))

    def _pass_window(self, row: _Row) -> None:
        """From here on windowed layers read no more than the window."""
        share = self._cost.window_share
        row.reads = row.reads * (1 - share) + share * self._cost.window
        row.slope = 1 - share

    def _count(self, row: _Row, times: int) -> None:
        level = self._levels.setdefault(row.budget, [0, 0.0, 0.0])
        level[0] += times
        level[1] += times * row.reads
        level[2] += times * row.slope
        if not level[0]:
            del self._levels[row.budget]

    def _finish(self, row: _Row, now: float) -> None:
        totals = self._totals
        totals.finished += 1
        totals.row_seconds += now - row.admitted
        totals.whole.add(now - row.arrival.seconds)
        totals.last_end = max(totals.last_end, now)

    # ------------------------------------------------------------------ decoding

    def _start_stretch(self, now: float, most: float) -> None:
        if self._policy is not None:
            most = 1
            self._ask(self._policy)
        self._steps = int(min(most, self._due[0][0] - self._clock))
        self._line = self._step_line()
        self._began = now
        self.end = now + _sum(*self._line, self._steps)

    def _ask(self, policy: BudgetPolicy) -> None:
        for row in self._running.values():
            position = self._clock - row.joined
            budget = policy.next_budget(RowView(row.number, position, row.budget, 0.0))
            if budget > row.budget:
                raise ScheduleError(
                    f"the policy raised request {row.number} from {row.budget} to {budget} layers at position "
                    f"{position}: a budget may only fall"
                )
            if budget != row.budget:
                self._count(row, -1)
                row.budget = budget
                self._count(row, 1)

    def _step_line(self) -> tuple[float, float]:
        """Seconds of the next step, and by how much each further one takes longer."""
        cost, rows, reads, slope = self._cost, 0, 0.0, 0.0
        first, growth = cost.fixed_seconds(len(self._running)), 0.0
        # Rows in depth order: the layers between two depths run on exactly the rows that are at least that deep.
        for depth, below in pairwise([*sorted(self._levels, reverse=True), 0]):
            level = self._levels[depth]
            rows += int(level[0])
            reads += level[1]
            slope += level[2]
            layers = depth - below
            read = layers * cost.kv_seconds(rows)
            first += layers * cost.layer_seconds(rows) + read * (reads + slope * self._clock)
            growth += read * slope
        return first, growth

    def _finish_stretch(self, now: float) -> None:
        totals, steps, rows = self._totals, self._steps, len(self._running)
        first, growth = self._line
        totals.steps += steps
        totals.row_steps += steps * rows
        totals.new_tokens += steps * rows
        totals.token_layers += steps * sum(depth * int(level[0]) for depth, level in self._levels.items())
        totals.layer_reads += steps * max(self._levels)
        totals.decode_seconds += now - self._began
        self._note_gaps(first, growth, steps, rows)
        self._clock += steps
        self._last = now
        while self._due and self._due[0][0] <= self._clock:
            _, number, change = heapq.heappop(self._due)
            row = self._running[number]
            self._count(row, -1)
            if change == -1:
                del self._running[number]
                self._finish(row, now)
                continue
            if change == -2:
                self._pass_window(row)
            else:
                row.budget = self._changes[change][1]
                self._push_change(row, change + 1)
            self._count(row, 1)

    def _note_gaps(self, first: float, growth: float, steps: int, rows: int) -> None:
        """Times between tokens: the first step's from each row's token before, prompts' forwards included."""
        gaps = self._totals.between_tokens
        if not self._fresh and self._began == self._last:
            gaps.add_line(first, growth, steps, rows)
            return
        end, old = self._began + first, rows
        for time, count in self._fresh:
            gaps.add(end - time, count)
            old -= count
        self._fresh = []
        if old:
            gaps.add(end - self._last, old)
        if steps > 1:
            gaps.add_line(first + growth, growth, steps - 1, rows)


def _changes(schedule: Schedule) -> Sequence[tuple[int, int]]:
    """Positions at which the budget changes, with the new one; position 0 first."""
    budgets = schedule.budgets
    return [(i, b) for i, b in enumerate(budgets) if i == 0 or b != budgets[i - 1]]


def _sum(first: float, growth: float, steps: int) -> float:
    return steps * first + growth * (steps * (steps - 1) / 2)


def _steps_until(seconds: float, first: float, growth: float, most: int) -> int:
    """The fewest steps, 1 to `most`, that take `seconds` or more."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if _sum(first, growth, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low
