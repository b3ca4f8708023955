"""The number of nodes of a run on Ray as machines come and go, with a cluster that is only played."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from surogate.errors import DataError, DivergedError, NodeLostError, RunError
from surogate.launch import growth, job
from surogate.launch.cluster import Machine
from surogate.launch.node import Said
from surogate.launch.wanted import Wanted

MACHINES = [Machine(f"id{number}", f"10.0.0.{number}", f"m{number}", 8, 0) for number in range(4)]

WANTED = Wanted(
    on_ray=True,
    ray_address="auto",
    num_nodes=2,
    min_nodes=1,
    max_nodes=4,
    saves=True,
    ranks=1,
    gpus=0,
    timeout=60,
    max_restarts=0,
    accumulation=6,
    divides_rows=False,
    output_dir="output",
    checkpoint_dir=None,
)


def test_the_number_of_nodes_divides_the_rows_of_a_step() -> None:
    assert [WANTED.fitting(machines) for machines in range(7)] == [0, 1, 2, 3, 4, 4, 4]
    eight = replace(WANTED, accumulation=4)
    assert [eight.fitting(machines) for machines in range(6)] == [0, 1, 2, 2, 4, 4]
    assert replace(WANTED, min_nodes=3, num_nodes=4, accumulation=2).fitting(3) == 0


def test_a_run_starts_with_its_number_and_later_with_what_is_there() -> None:
    assert [WANTED.starting(machines, 0, False) for machines in (1, 2, 4)] == [0, 2, 2]
    assert [WANTED.starting(machines, 2, False) for machines in (1, 2, 3)] == [0, 2, 3]
    assert [WANTED.starting(machines, 3, is_late) for machines, is_late in ((2, False), (2, True), (0, True))] == [0, 2, 0]


def test_further_machines_count_if_the_number_becomes_larger() -> None:
    assert [WANTED.larger(2, further) for further in range(4)] == [0, 3, 4, 4]
    assert [replace(WANTED, accumulation=4).larger(2, further) for further in (1, 2)] == [0, 4]
    assert [replace(WANTED, max_nodes=2).larger(nodes, 1) for nodes in (1, 2)] == [2, 0], "grows back to `num_nodes`"
    assert replace(WANTED, saves=False).larger(2, 2) == 0


def test_a_largest_number_that_adds_no_node_is_reported() -> None:
    assert WANTED.unused() is None and replace(WANTED, max_nodes=2).unused() is None
    reported = replace(WANTED, max_nodes=3, accumulation=4).unused() or ""
    assert "`distributed.max_nodes: 3` adds no node: the 8 micro-batches of a step cannot be divided by 3" in reported


@dataclass
class Played:
    """A cluster, and the ends of a run's nodes on it, a function for each start: it gives the codes of those that ended."""

    ends: list[Callable[[Played], dict[int, int]]]
    alive: list[Machine]
    newest: int = 40
    #: Facts of a machine that are not those of the others; machines without room or folder.
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)
    starts: list[list[list[str]]] = field(default_factory=list)
    signals: list[tuple[int, int]] = field(default_factory=list)
    is_local = False

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def machines(self) -> list[Machine]:
        return list(self.alive)

    def answers(self) -> bool:
        return True

    def room(self, machines: list[Machine], gpus: int) -> Workers:
        return Workers(self, machines)

    def workers(self, machines: list[Machine], gpus: int, seconds: float) -> Workers:
        if full := [machine for machine in machines if machine.id in self.full]:
            raise RunError(f"no room on {full[0]}")
        return Workers(self, machines)


@dataclass
class Workers:
    of: Played
    machines: list[Machine]

    def __len__(self) -> int:
        return len(self.machines)

    def has_room(self, seconds: float) -> bool:
        return not any(machine.id in self.of.full for machine in self.machines)

    def start(self) -> None:
        pass

    def begin(self, number: int, method: str, *arguments: Any) -> tuple[Any, ...]:
        if method == "signal":
            self.of.signals.append((number, arguments[0]))
        return (number, method, *arguments)

    def answer(self, number: int, call: tuple[Any, ...], seconds: float) -> Any:
        machine = self.machines[number]
        match call[1]:
            case "describe":
                return self.of.facts.get(machine.id, {"version": "1"})
            case "sees":
                return machine.id not in self.of.bare
            case "newest":
                return self.of.newest
            case "free_port":
                return 1
            case "start":
                if number == 0:
                    self.of.starts.append([])
                self.of.starts[-1].append(call[2].arguments)
                return None
            case "say":
                code = self.of.ends[len(self.of.starts) - 1](self.of).get(number)
                return Said(errors=[f"surogate: ended with {code}"] if code else [], code=code)
        raise AssertionError(call)

    def ask(self, number: int, method: str, *arguments: Any) -> Any:
        return self.answer(number, self.begin(number, method, *arguments), 1)

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return [self.ask(number, method, *arguments) for number in range(len(self))]

    def first(self, calls: list[Any], seconds: float) -> list[Any]:
        return calls[:1]

    def are_done(self, calls: list[Any]) -> bool:
        return True

    def put_first(self, number: int) -> None:
        self.machines.insert(0, self.machines.pop(number))

    def check_head(self) -> None:
        pass

    wait_for_head = close = check_head


def at_checkpoint(of: Played) -> dict[int, int]:
    """Ends as a run that was asked to end at its next checkpoint."""
    return dict.fromkeys(range(4), 128 + signal.SIGUSR2) if (0, signal.SIGUSR2) in of.signals else {}


def finished(_: Played) -> dict[int, int]:
    return dict.fromkeys(range(4), 0)


def failing(number: int, code: int) -> Callable[[Played], dict[int, int]]:
    """All end, because of one."""
    return lambda _: {of: code if of == number else 6 for of in range(4)} if code != 6 else {number: 6}


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(growth, "LOOK", 0.0)
    monkeypatch.setattr(growth, "TRIAL", 0.0)
    monkeypatch.setattr(job, "LOOK", 0.0)
    monkeypatch.setattr(job, "NOTICED", 0.2)

    def run(played: Played, **changed: Any) -> int:
        monkeypatch.setattr(job, "Cluster", lambda address, count: played)
        return job.Job(replace(WANTED, **changed), "sft", "run.json", "{}", [], True).lead()

    return run


def numbers(played: Played) -> list[int]:
    return [len(start) for start in played.starts]


def test_a_machine_that_joins_is_used_from_the_next_checkpoint(
    lead: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played([at_checkpoint, finished], MACHINES[:3])
    assert lead(played) == 0 and numbers(played) == [2, 3]
    first, second = (start[0] for start in played.starts)
    assert "--set=resume_from_checkpoint=true" in second and "--set=resume_from_checkpoint=true" not in first
    assert "--set=gradient_accumulation_steps=4" in second and "--set=distributed.max_nodes=null" in second
    assert "a further node: going on with 3 nodes from checkpoint step 40\n" in capsys.readouterr().out


def test_several_machines_are_used_at_once_where_one_does_not_divide_the_rows(
    lead: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played([at_checkpoint, finished], MACHINES)
    assert lead(played, accumulation=4) == 0 and numbers(played) == [2, 4]
    assert "2 further nodes: going on with 4 nodes" in capsys.readouterr().out


def test_a_run_that_lost_a_node_grows_again(lead: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "RETURN", 0.0)

    def lost(of: Played) -> dict[int, int]:
        of.alive = MACHINES[:1]
        return {1: 6}

    def back(of: Played) -> dict[int, int]:
        of.alive = [MACHINES[0], MACHINES[3]]
        return at_checkpoint(of)

    played = Played([lost, back, finished], MACHINES[:2])
    assert lead(played, max_nodes=2, max_restarts=1) == 0 and numbers(played) == [2, 1, 2]


@pytest.mark.parametrize("end", [failing(2, 4), failing(2, 6), failing(0, 3)])
def test_a_start_with_more_nodes_that_fails_is_followed_by_one_with_as_many_as_before(
    lead: Callable[..., int], capsys: pytest.CaptureFixture[str], end: Callable[[Played], dict[int, int]]
) -> None:
    played = Played([at_checkpoint, end, finished], MACHINES[:3])
    assert lead(played) == 0 and numbers(played) == [2, 3, 2]
    said = capsys.readouterr().err
    assert "the run does not go on with 3 nodes; it goes on with 2" in said, said
    assert "10.0.0.2 (m2) is not used for further nodes" in said and "restart 1" not in said, said


def test_room_that_is_gone_at_the_start_is_no_end(lead: Callable[..., int]) -> None:
    def taken(of: Played) -> dict[int, int]:
        ends = at_checkpoint(of)
        of.full = {"id2"} if ends else set()
        return ends

    played = Played([taken, finished], MACHINES[:3])
    assert lead(played) == 0 and numbers(played) == [2, 2]


def test_what_other_nodes_would_not_help_and_losses_after_a_checkpoint_end_the_run(lead: Callable[..., int]) -> None:
    with pytest.raises(DivergedError):
        lead(Played([at_checkpoint, failing(0, 5)], MACHINES[:3]))
    with pytest.raises(NodeLostError):
        lead(Played([at_checkpoint, failing(1, 6)], MACHINES[:3]))

    def later(of: Played) -> dict[int, int]:
        of.newest = 60
        return failing(2, 4)(of)

    with pytest.raises(DataError):
        lead(Played([at_checkpoint, later], MACHINES[:3]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"facts": {"id2": {"version": "2"}}}, "version: 1 on 10.0.0.0 (m0), 2 on 10.0.0.2 (m2)"),
        ({"full": {"id2"}}, "it starts no worker within"),
        ({"bare": {"id2"}}, "it has no folder"),
    ],
)
def test_a_machine_that_cannot_be_used_does_not_end_the_run(
    lead: Callable[..., int], capsys: pytest.CaptureFixture[str], changed: dict[str, Any], said: str
) -> None:
    """It is tried while the nodes say nothing for some time, and once."""
    looks = iter(range(60))
    played = Played([lambda of: finished(of) if next(looks) > 50 else {}], MACHINES[:3], **changed)
    assert lead(played) == 0 and numbers(played) == [2] and not played.signals
    found = capsys.readouterr().err
    assert found.count(said) == 1, found
