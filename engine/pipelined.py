"""An engine that keeps its device busy: it plans and launches the next step before it looks at the tokens of the last one.

The host's part of a step (planning, stop checks, text, grammars) then lies behind the device's. A stream that turns out to have ended is
fed once more for nothing; its row is dropped. Where a grammar holds a stream, a step's forward pass runs while the host learns the token
before and fills the mask. Steps whose tokens the host draws (temperatures) are waited for. Answers are as of `Engine`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from askmany.engine.answers import Detokenizer
from askmany.engine.engine import CHECK_SHARE, Engine
from askmany.engine.metrics import Metrics, measure
from askmany.engine.request import Phase, Stream, StreamResult
from askmany.engine.scheduler import Scheduler
from askmany.engine.step import Executor, Sampled, StepPlan


class PendingStep(Protocol):
    """A step under way. `ahead`: the next may be launched before this one is collected, but not before `draw`."""

    ahead: bool

    def draw(self) -> None:
        """The tokens of all steps before are booked: say what depends on them. Does not wait."""
        ...

    def collect(self) -> list[Sampled]:
        """One `Sampled` for each run that samples, in plan order; waits for the device."""
        ...


class LaunchingExecutor(Executor, Protocol):
    """An executor whose device works on while the host does."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step."""
        ...

    def device_times(self) -> tuple[float, float]:
        """Seconds that the device was busy, and idle between steps, so far."""
        ...

    def pause(self) -> None:
        """There is no work: the time until the next step is nobody's."""
        ...


class PipelinedEngine(Engine):
    """As `Engine`; results come one step later."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: LaunchingExecutor,
        detokenizer: Detokenizer,
        eos_token_ids: Iterable[int] = (),
        kv_bytes_per_token: int = 0,
        check_share: float = CHECK_SHARE,
    ) -> None:
        super().__init__(scheduler, executor, detokenizer, eos_token_ids, kv_bytes_per_token, check_share)
        self._device = executor
        self._under_way: tuple[StepPlan, PendingStep] | None = None

    @property
    def metrics(self) -> Metrics:
        """Everything counted so far."""
        busy_s, idle_s = self._device.device_times()
        return replace(super().metrics, device_busy_s=busy_s, device_idle_s=idle_s)

    def _turn(self, started_s: float) -> list[StreamResult]:
        before, self._under_way = self._under_way, None
        self._plan = plan = self.scheduler.plan()
        counted, pending = Metrics(), None
        if plan is not None:
            counted = measure(plan, self._kv_bytes_per_token)
            pending = self._device.launch(plan)
            if pending.ahead:
                self.scheduler.launch(plan)
                self._under_way = (plan, pending)
        finished = self._settle(*before) if before else []
        if plan is not None and pending is not None:
            self._plan = plan
            if pending.ahead:
                pending.draw()
            else:
                finished += self._finish(plan, pending)
        if plan is None and before is None:
            return []
        if not self.has_work:
            if self._under_way:  # it feeds streams that have just ended
                finished += self._settle(*self._under_way)
                self._under_way = None
            self._device.pause()
        return self._hand_out(plan, finished, counted, started_s)

    def _settle(self, plan: StepPlan, pending: PendingStep) -> list[Stream]:
        self._plan = plan  # an error that shows now is this step's
        sampled = _alive(self._matched(plan, pending.collect()))
        return self.scheduler.settle(plan, sampled, self._judge(sampled))

    def _finish(self, plan: StepPlan, pending: PendingStep) -> list[Stream]:
        """A step that is complete when it is launched; streams that ended in the one before take no part any more."""
        self._plan = plan
        sampled = _alive(self._matched(plan, pending.collect()))
        return self.scheduler.advance(plan, sampled, self._judge(sampled))


def _alive(sampled: list[Sampled]) -> list[Sampled]:
    return [sample for sample in sampled if sample.stream.phase is not Phase.DONE]
