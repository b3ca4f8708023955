"""Further machines for a run that goes: finds those that joined the cluster, and tries each before the run counts on it.

A machine that fails is left out for a while, so that the run is not ended for nothing. Does not know what nodes do.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from ..errors import NodeLostError, SurogateError
from ..terminal import warn
from .cluster import Cluster, Lost, Machine, Workers, compare
from .wanted import Wanted

#: Seconds between two looks at the cluster's machines.
LOOK = 5.0

#: Seconds that a machine has to start a worker, and those until one that did not is tried again.
TRIAL, AGAIN = 60.0, 300.0


@dataclass
class LeftOut:
    """Machines that the run does not use for now: name and end of that, by id."""

    _until: dict[str, float] = field(default_factory=dict)

    def __contains__(self, machine: Machine) -> bool:
        return time.monotonic() < self._until.get(machine.id, 0.0)

    def add(self, machine: Machine, why: str, seconds: float = AGAIN) -> None:
        """Leaves out a machine, and says why the first time."""
        if machine.id not in self._until:
            warn(f"surogate: {machine} is not used for further nodes: {why}")
        self._until[machine.id] = time.monotonic() + seconds


class Trial:
    """A worker on a machine, started without waiting for it."""

    def __init__(self, cluster: Cluster, machine: Machine, gpus: int) -> None:
        self.machine = machine
        self._workers: Workers = cluster.room([machine], gpus)
        self._calls: list[Any] = []
        self._until = time.monotonic() + TRIAL

    def answers(self) -> tuple[dict[str, str], bool] | None:
        """The machine's facts, and whether it has the folder of the command; None while there is no answer. Raises `Lost` or
        RunError where the machine cannot be used."""
        workers = self._workers
        if not self._calls and workers.has_room(0.1):
            workers.start()
            self._calls = [workers.begin(0, "describe"), workers.begin(0, "sees", os.getcwd(), ".")]
        if self._calls and workers.are_done(self._calls):
            facts, sees = (workers.answer(0, call, LOOK) for call in self._calls)
            return facts, sees
        if time.monotonic() > self._until:
            raise Lost(0, f"it starts no worker within {TRIAL:.0f} s: perhaps another job uses it, see `ray status`")
        return None

    def close(self) -> None:
        """Ends the worker and gives its room back."""
        self._workers.close()


class Growth:
    """The further machines of a run, from the start of its nodes to their end."""

    def __init__(self, cluster: Cluster, wanted: Wanted, used: list[Machine], facts: dict[str, str], left_out: LeftOut) -> None:
        """`used` and `facts` are the machines of the run and what all of them have in common."""
        self._cluster = cluster
        self._wanted = wanted
        self._used = used
        self._facts = facts
        self._left_out = left_out
        self._trial: Trial | None = None
        #: Machines that have passed their trial.
        self._ready: set[Machine] = set()
        self._due = time.monotonic() + LOOK

    def look(self) -> int:
        """The number of nodes with which the run can go on from its next checkpoint; 0 for the present one. Returns soon."""
        if not self._wanted.saves or self._wanted.fitting(self._wanted.max_nodes) <= len(self._used):
            return 0
        if not self._cluster.answers():
            return self._number()
        try:
            if self._trial:
                self._go_on(self._trial)
            elif time.monotonic() >= self._due:
                self._find()
        except NodeLostError:
            pass  # Whoever follows the nodes learns it, too.
        return self._number()

    def close(self) -> None:
        """Gives up the trial in progress, if there is one."""
        if self._trial:
            self._trial.close()
            self._trial = None

    def _number(self) -> int:
        return self._wanted.larger(len(self._used), len(self._ready))

    def _find(self) -> None:
        """Begins a trial of a machine, if the run can have more nodes with it than with those that are ready."""
        self._due = time.monotonic() + LOOK
        used = {machine.id for machine in self._used}
        fit = [of for of in self._cluster.machines() if of.has_place(self._wanted.gpus) and of.id not in used and of not in self._left_out]
        self._ready &= set(fit)
        untried = [machine for machine in fit if machine not in self._ready]
        if untried and self._wanted.larger(len(self._used), len(fit)) > self._number():
            try:
                self._trial = Trial(self._cluster, untried[0], self._wanted.gpus)
            except SurogateError as error:
                self._left_out.add(untried[0], str(error))

    def _go_on(self, trial: Trial) -> None:
        """Ends the trial once the machine has answered."""
        try:
            answer = trial.answers()
            if answer is None:
                return
            facts, sees = answer
            compare([self._used[0], trial.machine], [self._facts, facts])
            if sees:
                self._ready.add(trial.machine)
            else:
                self._left_out.add(trial.machine, f"it has no folder `{os.getcwd()}`, in which the command was given")
        except NodeLostError:
            raise
        except (Lost, SurogateError) as error:
            self._left_out.add(trial.machine, str(error))
        self.close()
        # The next one without a pause.
        self._due = 0.0
