"""Leads a run on a Ray cluster: chooses machines, starts a node on each, shows what node 0 says, and starts all of them
again from the last checkpoint where one was lost or further machines are there.

A node gets its number, an address and a token, and is from then on what it is by hand. Knows no option but those of
`distributed`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .. import _native
from ..errors import ConfigError, NodeLostError, RunError
from ..terminal import show, warn
from .cluster import Cluster, Lost, Machine, Workers, compare
from .ends import AT_CHECKPOINT, DIVERGED, EXCEPTIONS, LOST, End, cause, ending, verdict
from .growth import TRIAL, Growth, LeftOut
from .node import Said, Start
from .wanted import Wanted

#: Variables that every node gets from the process that leads.
FORWARDED = re.compile(
    r"(NCCL|SUROGATE|HF|HUGGING_FACE|WANDB|AIM|AWS|GOOGLE|SSL|REQUESTS|RUST|TOKENIZERS)_.*|(https?|no|all)_proxy|NO_COLOR", re.I
)

#: Seconds between two requests to end at the next checkpoint: one that comes early in the process' life has no effect.
REQUEST = 5.0

#: Seconds that node 0 has to name its newest checkpoint, after another one has failed.
NEWEST = 10.0

#: Seconds that the others have to notice the end of a node.
NOTICED = 45.0

#: Seconds that the nodes have to save a checkpoint where the head of the cluster is lost: then Ray ends this process, too.
SAVES = 25.0

#: Seconds after which a run that may go on with fewer nodes does.
RETURN = 60.0

#: Lines of a node's standard error that are kept.
WORDS = 50

#: Between two looks at the cluster, seconds.
LOOK = 1.0


@dataclass
class Attempt:
    """The end of all nodes after a start."""

    code: int
    #: Why it is that code.
    text: str
    machines: list[Machine]
    #: True if there were more nodes than before, and the run has not gone on with them.
    is_refused: bool


@dataclass
class Words:
    """A node's lines on standard error."""

    #: The last lines, and those that were not read yet.
    last: list[str] = field(default_factory=list)
    unshown: list[str] = field(default_factory=list)


@dataclass
class Job:
    """A run, from its first node to its end."""

    wanted: Wanted
    task: str
    #: Name and text of the file of options.
    name: str
    text: str
    #: Words of the command line after the file.
    arguments: list[str]
    #: Whether lines about the nodes are shown.
    is_told: bool
    #: Machine of node 0, which has the run's files.
    _leader: Machine | None = None
    #: Machines with which the run has worked last; none before its first end.
    _known: list[Machine] = field(default_factory=list)
    #: Facts that its machines have in common.
    _facts: dict[str, str] = field(default_factory=dict)
    #: Step of the checkpoint from which the nodes were started.
    _step: int | None = None
    _left_out: LeftOut = field(default_factory=LeftOut)
    _signals: list[int] = field(default_factory=list)

    def lead(self) -> int:
        """Gives the exit code of node 0. Raises what ended the run."""
        with Cluster(self.wanted.ray_address, self.wanted.num_nodes) as cluster:
            restarts = 0
            while True:
                attempt = self._attempt(cluster)
                if self._signals:
                    break
                if attempt.is_refused:
                    self._leave_out(attempt.machines, attempt.text)
                elif attempt.code == AT_CHECKPOINT:
                    self._known = attempt.machines
                elif attempt.code == LOST and restarts < self.wanted.max_restarts:
                    self._known = attempt.machines
                    restarts += 1
                    warn(f"surogate: {attempt.text}")
                    warn(f"surogate: restart {restarts} of {self.wanted.max_restarts}, from the last checkpoint")
                else:
                    break
        if attempt.code == AT_CHECKPOINT:
            return 128 + self._signals[-1]
        if attempt.code == 0 or attempt.code > 128:
            return attempt.code
        raise EXCEPTIONS.get(attempt.code, RunError)(attempt.text)

    def _attempt(self, cluster: Cluster) -> Attempt:
        """All nodes from their start to their end."""
        workers = self._gather(cluster)
        machines = workers.machines
        growth = Growth(cluster, self.wanted, machines, self._facts, self._left_out)
        try:
            self._start(workers)
            ends = self._follow(workers, growth)
            is_refused = self._is_larger(machines) and self._is_refused(workers, ends)
        except Lost as lost:
            ends = {lost.number: End(LOST, lost.why)}
            is_refused = self._is_larger(machines) and self._is_new(machines[lost.number])
        except NodeLostError:
            raise
        except RunError as error:
            if not self._is_larger(machines):
                raise
            return Attempt(1, str(error), machines, True)
        finally:
            growth.close()
            workers.close()
        return Attempt(*verdict(ends, machines), machines, is_refused)

    def _is_larger(self, machines: list[Machine]) -> bool:
        """True if there are more machines than the run had before; false at its first start."""
        return 0 < len(self._known) < len(machines)

    def _is_new(self, machine: Machine) -> bool:
        return bool(self._known) and machine.id not in {known.id for known in self._known}

    def _is_refused(self, workers: Workers, ends: dict[int, End]) -> bool:
        """True if the nodes ended before they have written a checkpoint, and not for a reason that fewer would have, too."""
        if 0 in ends and (ends[0].code == 0 or ends[0].code > 128):
            return False
        number, end = cause(ends)
        if end.code == DIVERGED or (end.code == LOST and not self._is_new(workers.machines[number])):
            return False
        try:
            newest = self._newest(workers)
        except (Lost, RunError):
            return False
        return newest is None or newest == self._step

    def _newest(self, workers: Workers) -> int | None:
        """Step of the newest checkpoint that node 0 has."""
        call = workers.begin(0, "newest", os.getcwd(), self.wanted.checkpoint_dir or self.wanted.output_dir)
        step: int | None = workers.answer(0, call, NEWEST)
        return step

    def _leave_out(self, machines: list[Machine], why: str) -> None:
        """The next start is without the machines that are new among these."""
        warn(f"surogate: {why}")
        warn(f"surogate: the run does not go on with {len(machines)} nodes; it goes on with {len(self._known)}")
        for machine in filter(self._is_new, machines):
            self._left_out.add(machine, "the run has not gone on with it", float("inf"))

    def _gather(self, cluster: Cluster) -> Workers:
        """A worker for each node, on machines that are alike."""
        begun = time.monotonic()
        until = begun + self.wanted.timeout
        while True:
            machines = self._choose(cluster, begun, until)
            is_larger = self._is_larger(machines)
            workers = None
            try:
                workers = cluster.workers(machines, self.wanted.gpus, min(self.wanted.timeout, TRIAL if is_larger else math.inf))
                facts = workers.ask_all("describe")
                compare(machines, facts)
                self._facts = facts[0]
                self._put_leader_first(workers)
                return workers
            except Lost as lost:
                if workers:
                    workers.close()
                if self._is_new(machines[lost.number]) and is_larger:
                    self._leave_out(machines, f"{machines[lost.number]}: {lost.why}")
                elif time.monotonic() > until:
                    raise NodeLostError(f"{machines[lost.number]}: {lost.why}") from None
            except BaseException as error:
                if workers:
                    workers.close()
                if not is_larger or not isinstance(error, (RunError, ConfigError)) or isinstance(error, NodeLostError):
                    raise
                self._leave_out(machines, str(error))
            time.sleep(LOOK)

    def _choose(self, cluster: Cluster, begun: float, until: float) -> list[Machine]:
        """Machines for the nodes: at the start the number that is wanted, later those that are there in time. Those that the
        run had before come first."""
        wanted = self.wanted
        places = {machine.id: place for place, machine in enumerate(self._known)}
        while True:
            alive = cluster.machines()
            fit = [machine for machine in alive if machine.has_place(wanted.gpus) and machine not in self._left_out]
            fit.sort(key=lambda machine: places.get(machine.id, len(places)))
            if cluster.is_local:
                fit = fit * wanted.num_nodes
            is_late = time.monotonic() > min(until, begun + RETURN)
            if count := wanted.starting(len(fit), len(self._known), is_late):
                return fit[:count]
            if not self._known or time.monotonic() > until:
                raise (NodeLostError if self._known else RunError)(_too_few(wanted, alive))
            time.sleep(LOOK)

    def _put_leader_first(self, workers: Workers) -> None:
        """Node 0 is where the run's files are. Raises `Lost` where no machine has them."""
        ids = [machine.id for machine in workers.machines]
        if self._leader is not None and self._leader.id in ids:
            workers.put_first(ids.index(self._leader.id))
        elif self._leader is not None:
            seen = workers.ask_all("sees", os.getcwd(), self.wanted.output_dir)
            if True not in seen:
                text = f"node 0 was {self._leader}, and no other machine has its `output_dir: {self.wanted.output_dir}`"
                raise Lost(0, f"{text}; with one that all machines share, any of them can go on")
            workers.put_first(seen.index(True))
        self._leader = workers.machines[0]

    def _start(self, workers: Workers) -> None:
        wanted, machines = self.wanted, workers.machines
        count = len(machines)
        if self._known:
            self._step = self._newest(workers)
        if self.is_told:
            if further := sum(map(self._is_new, machines)) if self._is_larger(machines) else 0:
                nodes = "a further node" if further == 1 else f"{further} further nodes"
                place = "the start" if self._step is None else f"checkpoint step {self._step}"
                show(f"{nodes}: going on with {count} nodes from {place}")
            show("Ray: " + ", ".join(f"node {number} is {machine}" for number, machine in enumerate(machines)))
        address = machines[0].address
        host = f"[{address}]" if ":" in address else address
        given = {
            "distributed.num_nodes": count,
            "distributed.rendezvous": f"{host}:{workers.ask(0, 'free_port', address)}",
            "distributed.max_restarts": 0,
            "distributed.min_nodes": "null",
            "distributed.max_nodes": "null",
        }
        if count != wanted.num_nodes and not wanted.divides_rows:
            given["gradient_accumulation_steps"] = wanted.accumulation * wanted.num_nodes // count
        if self._known:
            given["resume_from_checkpoint"] = "true"
        words = [*self.arguments, *(f"--set={name}={value}" for name, value in given.items())]
        environment = {name: value for name, value in os.environ.items() if FORWARDED.fullmatch(name)}
        environment["SUROGATE_TOKEN"] = secrets.token_hex(32)
        environment.pop("SUROGATE_TOKEN_FILE", None)
        calls = []
        for number in range(count):
            of_node = [*words, f"--set=distributed.node_rank={number}"]
            start = Start(self.task, self.name, self.text, of_node, os.getcwd(), environment)
            calls.append(workers.begin(number, "start", start))
        for number, call in enumerate(calls):
            workers.answer(number, call, NOTICED)

    def _follow(self, workers: Workers, growth: Growth) -> dict[int, End]:
        """Shows what node 0 says, until all nodes have ended; how they did. With further machines the end comes at the next
        checkpoint. Raises NodeLostError where the head is lost."""
        ends: dict[int, End] = {}
        words = [Words() for _ in workers.machines]
        calls = {workers.begin(number, "say", LOOK): number for number in range(len(workers))}
        failed_at = None
        requested_at = -math.inf
        head_lost: NodeLostError | None = None
        with self._signals_passed_to(workers, ends):
            while calls:
                for call in workers.first(list(calls), LOOK):
                    number = calls.pop(call)
                    try:
                        said: Said = workers.answer(number, call, NOTICED)
                    except Lost as lost:
                        ends[number] = End(LOST, lost.why)
                        continue
                    self._take(number, said, words[number])
                    if said.ended and head_lost is None:
                        # A client does not see more of the head than its server.
                        head_lost, failed_at = NodeLostError(said.ended), time.monotonic() - NOTICED + SAVES
                    if said.code is None:
                        calls[workers.begin(number, "say", LOOK)] = number
                    else:
                        ends[number] = ending(said.code, words[number].last)
                self._pass_signals(workers, ends)
                if head_lost is None:
                    try:
                        workers.check_head()
                    except NodeLostError as lost:
                        # The nodes know it themselves.
                        head_lost, failed_at = lost, time.monotonic() - NOTICED + SAVES
                if failed_at is None and any(0 < end.code <= 128 for end in ends.values()):
                    failed_at = time.monotonic()
                if not ends and head_lost is None and growth.look() and time.monotonic() > requested_at + REQUEST:
                    workers.begin(0, "signal", signal.SIGUSR2)
                    requested_at = time.monotonic()
                if failed_at is not None and time.monotonic() > failed_at + NOTICED:
                    break
        if 0 not in ends or ends[0].code:
            if head_lost is not None:
                raise head_lost
            # The nodes may have known it a moment before.
            workers.wait_for_head()
        return ends

    def _take(self, number: int, said: Said, words: Words) -> None:
        """Shows lines of node 0. Those of standard error wait: the last ones before its end are why it ended."""
        if number == 0 and (not said.code or said.code > 128):
            for line in words.unshown:
                warn(line)
            for line in said.lines:
                show(line)
            words.unshown = []
        words.unshown += said.errors
        words.last = [*words.last, *said.errors][-WORDS:]

    @contextmanager
    def _signals_passed_to(self, workers: Workers, ends: dict[int, End]) -> Iterator[None]:
        """A first signal ends the run in order; after a second SIGINT nothing is waited for."""

        def remember(number: int, _frame: object) -> None:
            if number == signal.SIGINT and signal.SIGINT in self._signals:
                raise KeyboardInterrupt
            self._signals.append(number)

        kinds = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        before = [signal.signal(kind, remember) for kind in kinds]
        self._passed = 0
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _pass_signals(self, workers: Workers, ends: dict[int, End]) -> None:
        while self._passed < len(self._signals):
            for number in set(range(len(workers))) - set(ends):
                workers.begin(number, "signal", self._signals[self._passed])
            self._passed += 1


def _too_few(wanted: Wanted, alive: list[Machine]) -> str:
    need = f"{wanted.gpus} GPUs" if wanted.gpus else "a CPU"
    lines = [f"  {machine}: {machine.cpus:.0f} CPUs, {machine.gpus:.0f} GPUs" for machine in alive]
    text = f"`distributed.num_nodes: {wanted.num_nodes}` needs as many machines with {need}, but the Ray cluster has these alone:"
    hint = "  hint: start Ray on the missing ones: ray start --address=HEAD:6379"
    return "\n".join([text, *lines, hint])


def of(options: Namespace, overrides: list[tuple[str, str]], run: str | None, config: _native.Config) -> Job:
    """The run of a command line. Its configuration was loaded here: what is wrong with it is not asked of the cluster."""
    nodes = json.loads(config.nodes)
    gpus = 0 if config.device == "cpu" else nodes["ranks"]
    path = Path(options.config)
    words = [f"--run={run}"] if run else []
    words += [f"--{name}" for name in ("quiet", "json") if getattr(options, name)]
    words += [f"--set={name}={value}" for name, value in overrides]
    wanted = Wanted(**nodes, gpus=gpus, output_dir=config.output_dir, checkpoint_dir=config.checkpoint_dir)
    if unused := wanted.unused():
        warn(f"surogate: {unused}")
    text = path.read_text(encoding="utf-8")
    return Job(wanted, options.command, path.name, text, words, not (options.quiet or options.json or config.logs_json))
