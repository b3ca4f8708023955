"""Leads a run on a Ray cluster: chooses machines, starts a node on each, shows what node 0 says, and starts all of them
again from the last checkpoint where one was lost.

A node gets its number, an address and a token, and is from then on what it is by hand. Knows no option but those of
`distributed`.
"""

from __future__ import annotations

import json
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

from .. import _native, errors
from ..errors import ConfigError, NodeLostError, RunError
from ..terminal import show, warn
from .cluster import Cluster, Lost, Machine, Workers
from .node import Said, Start

#: Variables that every node gets from the process that leads.
FORWARDED = re.compile(
    r"(NCCL|SUROGATE|HF|HUGGING_FACE|WANDB|AIM|AWS|GOOGLE|SSL|REQUESTS|RUST|TOKENIZERS)_.*|(https?|no|all)_proxy|NO_COLOR", re.I
)

#: What a process ends with where another node is gone: the run is worth starting again.
LOST = 6

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

EXCEPTIONS = {
    2: ConfigError,
    3: errors.MemoryPlanError,
    4: errors.DataError,
    5: errors.DivergedError,
    LOST: NodeLostError,
}


@dataclass(frozen=True)
class Wanted:
    """The options of nodes."""

    on_ray: bool
    ray_address: str
    num_nodes: int
    min_nodes: int
    #: Ranks of each node, and how many of them are GPUs.
    ranks: int
    gpus: int
    timeout: int
    max_restarts: int
    #: Micro-batches that each rank accumulates; its rows of a step where `batch_size` gives those of all.
    accumulation: int
    #: Whether the engine divides the rows of `batch_size`.
    divides_rows: bool
    output_dir: str

    def fitting(self, machines: int) -> int:
        """The most nodes, on these machines, whose steps have as many rows; 0 where there are too few."""
        of_all = self.num_nodes * self.accumulation
        counts = range(min(machines, self.num_nodes), self.min_nodes - 1, -1)
        return next((count for count in counts if of_all % count == 0), 0)


@dataclass
class End:
    """The end of a node: its exit code, and its last words."""

    code: int
    words: str


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
    _signals: list[int] = field(default_factory=list)

    def lead(self) -> int:
        """Gives the exit code of node 0. Raises what ended the run."""
        with Cluster(self.wanted.ray_address, self.wanted.num_nodes) as cluster:
            restarts = 0
            while True:
                code, text = self._attempt(cluster, restarts > 0)
                if code != LOST or restarts == self.wanted.max_restarts or self._signals:
                    break
                restarts += 1
                warn(f"surogate: {text}")
                warn(f"surogate: restart {restarts} of {self.wanted.max_restarts}, from the last checkpoint")
        if code == 0 or code > 128:
            return code
        raise EXCEPTIONS.get(code, RunError)(text)

    def _attempt(self, cluster: Cluster, is_restart: bool) -> tuple[int, str]:
        """All nodes from their start to their end: an exit code, and why it is that."""
        workers = self._gather(cluster, is_restart)
        try:
            self._start(workers, is_restart)
            ends = self._follow(workers)
        except Lost as lost:
            ends = {lost.number: End(LOST, lost.why)}
        finally:
            workers.close()
        return verdict(ends, workers.machines)

    def _gather(self, cluster: Cluster, is_restart: bool) -> Workers:
        """A worker for each node, on machines that are alike."""
        begun = time.monotonic()
        until = begun + self.wanted.timeout
        while True:
            machines = self._choose(cluster, begun, until, is_restart)
            workers = None
            try:
                workers = cluster.workers(machines, self.wanted.gpus, self.wanted.timeout)
                compare(machines, workers.ask_all("describe"))
                self._put_leader_first(workers)
                return workers
            except Lost as lost:
                if workers:
                    workers.close()
                if time.monotonic() > until:
                    raise NodeLostError(f"{machines[lost.number]}: {lost.why}") from None
            except BaseException:
                if workers:
                    workers.close()
                raise
            time.sleep(LOOK)

    def _choose(self, cluster: Cluster, begun: float, until: float, is_restart: bool) -> list[Machine]:
        """Machines for the nodes: at the start the number that is wanted, later those that are there in time."""
        wanted = self.wanted
        while True:
            alive = cluster.machines()
            fit = [machine for machine in alive if machine.cpus >= 1 and machine.gpus >= wanted.gpus]
            places = wanted.num_nodes if cluster.is_local else len(fit)
            if cluster.is_local:
                fit = fit * wanted.num_nodes
            is_late = time.monotonic() > min(until, begun + RETURN)
            if places >= wanted.num_nodes:
                return fit[: wanted.num_nodes]
            if is_restart and is_late and (count := wanted.fitting(places)):
                return fit[:count]
            if not is_restart or time.monotonic() > until:
                raise (NodeLostError if is_restart else RunError)(_too_few(wanted, alive))
            time.sleep(LOOK)

    def _put_leader_first(self, workers: Workers) -> None:
        """Node 0 is where the run's files are. Raises `Lost` where no machine has them."""
        if self._leader is not None and self._leader.id not in {machine.id for machine in workers.machines}:
            seen = workers.ask_all("sees", os.getcwd(), self.wanted.output_dir)
            if True not in seen:
                text = f"node 0 was {self._leader}, and no other machine has its `output_dir: {self.wanted.output_dir}`"
                raise Lost(0, f"{text}; with one that all machines share, any of them can go on")
            workers.put_first(seen.index(True))
        self._leader = workers.machines[0]

    def _start(self, workers: Workers, is_restart: bool) -> None:
        wanted, machines = self.wanted, workers.machines
        count = len(machines)
        if self.is_told:
            show("Ray: " + ", ".join(f"node {number} is {machine}" for number, machine in enumerate(machines)))
        address = machines[0].address
        host = f"[{address}]" if ":" in address else address
        given = {
            "distributed.num_nodes": count,
            "distributed.rendezvous": f"{host}:{workers.ask(0, 'free_port', address)}",
            "distributed.max_restarts": 0,
            "distributed.min_nodes": "null",
        }
        if count != wanted.num_nodes and not wanted.divides_rows:
            given["gradient_accumulation_steps"] = wanted.accumulation * wanted.num_nodes // count
        if is_restart:
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

    def _follow(self, workers: Workers) -> dict[int, End]:
        """Shows what node 0 says, until all nodes have ended; how they did. Raises NodeLostError where the head is lost."""
        ends: dict[int, End] = {}
        words = [Words() for _ in workers.machines]
        calls = {workers.begin(number, "say", LOOK): number for number in range(len(workers))}
        failed_at = None
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
                if failed_at is None and any(end.code for end in ends.values()):
                    failed_at = time.monotonic()
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
        if number == 0 and not said.code:
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

        kinds = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
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


def compare(machines: list[Machine], facts: list[dict[str, str]]) -> None:
    """Raises ConfigError with all that machines do not have in common."""
    names = sorted({name for of in facts for name in of})
    differing = [name for name in names if len({of.get(name) for of in facts}) > 1]
    if differing:
        lines = [
            f"  {name}: " + ", ".join(f"{of.get(name, 'none')} on {machine}" for machine, of in zip(machines, facts, strict=True))
            for name in differing
        ]
        raise ConfigError("\n".join(["the machines of the cluster are not alike:", *lines]))


def ending(code: int, words: list[str]) -> End:
    """The end of a process. One that a signal killed is lost."""
    begins = [at for at, line in enumerate(words) if line.startswith("surogate: ")]
    text = "\n".join(words[begins[-1] if begins else 0 :]).strip().removeprefix("surogate: ")
    if code < 0:
        return End(LOST, f"its process was killed by signal {-code}" + (f"\n{text}" if text else ""))
    return End(code, text or f"its process ended with exit code {code}")


def verdict(ends: dict[int, End], machines: list[Machine]) -> tuple[int, str]:
    """The exit code of all and the cause of the end: the root cause with its node, not its consequences elsewhere."""
    if 0 in ends and (ends[0].code == 0 or ends[0].code > 128):
        return ends[0].code, ""
    failed = {number: end for number, end in sorted(ends.items()) if end.code}
    consequence = re.compile(r"the run was ended by node (\d+): ")
    roots = [number for number, end in failed.items() if not consequence.match(end.words)]
    # One that failed by itself, before one that was found missing.
    roots.sort(key=lambda number: failed[number].code == LOST)
    number = roots[0] if roots else min(failed)
    end = failed[number]
    if match := consequence.match(end.words):
        number, end = int(match[1]), End(end.code, end.words[match.end() :])
    return end.code, f"node {number}, {machines[number]}: {end.words}"


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
    wanted = Wanted(**nodes, gpus=gpus, output_dir=config.output_dir)
    text = path.read_text(encoding="utf-8")
    return Job(wanted, options.command, path.name, text, words, not (options.quiet or options.json or config.logs_json))
