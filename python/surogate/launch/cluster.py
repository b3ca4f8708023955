"""The machines of a Ray cluster, and a worker on each that a run takes. The only file that speaks with Ray.

What goes through Ray are options, lines of text and exit codes: no tensor and no sample. Does not know what a run is.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, NodeLostError, RunError
from .node import Node

#: Attempts to start a cluster of this machine alone. Ray ends one after 30 s, which is too few for a busy machine.
TRIES = 3

#: Seconds in which a worker has to answer what takes no time, such as its start.
ANSWER = 60.0

#: Between two looks at the cluster, seconds.
LOOK = 5

#: Seconds without an answer after which the head of the cluster is lost. After 60 Ray itself ends all that belongs to the cluster,
#: and gives no reason.
SILENCE = 20.0

#: Seconds in which a head answers, and between two questions.
ASKED = 1.0

#: Bytes of the object store of a cluster that is started here: nothing lies in it.
STORE = 128 << 20

#: Calls to a worker at once: one that waits for lines must not keep a signal out.
CALLS = 4


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster."""

    id: str
    address: str
    host: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.address} ({self.host})" if self.host != self.address else self.address

    def has_place(self, gpus: int) -> bool:
        """True if it has a CPU and as many GPUs, whoever uses them."""
        return self.cpus >= 1 and self.gpus >= gpus


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


class Lost(Exception):
    """A worker is gone or does not answer."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number
        self.why = why


class Head:
    """The head of a cluster, which is asked whether it is still there."""

    def __init__(self, address: str) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._answered = self._asked = time.monotonic()

    def answers(self) -> bool:
        """True if it answered when it was asked last, a second ago at most."""
        if time.monotonic() > self._asked + ASKED:
            self._asked = time.monotonic()
            try:
                socket.create_connection(self._place, ASKED).close()
                self._answered = time.monotonic()
            except OSError:
                pass
        return self._answered >= self._asked

    def check(self) -> None:
        """Raises NodeLostError where it has not answered for too long."""
        if not self.answers() and time.monotonic() > self._answered + SILENCE:
            raise self.lost()

    def lost(self) -> NodeLostError:
        """The error of a head that does not answer."""
        return NodeLostError(f"the head of the Ray cluster, {self.address}, is lost: no answer for {SILENCE:.0f} s")

    def wait(self) -> None:
        """Until it answers. What Ray is asked without a head never comes back."""
        while not self.answers():
            self.check()
            time.sleep(ASKED / 4)


class Calls:
    """Calls of Ray. One of a client never comes back where its server is gone: it is given up, and with it the head."""

    def __init__(self, server: Head | None) -> None:
        """`server` is what a client speaks with; none where this process belongs to the cluster."""
        self._server = server
        self.is_lost = False

    def __call__(self, function: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """The result of a function that may take `LOOK` seconds at most. Raises NodeLostError if it does not return in
        time."""
        if self._server is None:
            return function(*arguments, **named)
        if self.is_lost:
            raise self._server.lost()
        until = time.monotonic() + LOOK + SILENCE
        found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                found.put((function(*arguments, **named), None))
            except BaseException as error:
                found.put((None, error))

        threading.Thread(target=run, daemon=True).start()
        while True:
            try:
                value, error = found.get(timeout=ASKED)
            except queue.Empty:
                self._check(self._server, until)
                continue
            if isinstance(error, ConnectionError):
                self.is_lost = True
                raise self._server.lost() from None
            if error is not None:
                raise error
            return value

    def _check(self, server: Head, until: float) -> None:
        try:
            server.check()
        except NodeLostError:
            self.is_lost = True
            raise
        if time.monotonic() > until:
            self.is_lost = True
            raise server.lost()


class Worker(Node):
    """A node that Ray starts. It ends with the head: no user could see or end it any more."""

    def __init__(self) -> None:
        super().__init__()
        import ray

        head = Head(ray.get_runtime_context().gcs_address)
        threading.Thread(target=self._watch, args=(head,), daemon=True).start()

    def _watch(self, head: Head) -> None:
        try:
            while True:
                head.check()
                time.sleep(ASKED)
        except NodeLostError as lost:
            self.end(str(lost))


class Cluster:
    """A connection to Ray, as long as a `with` block lasts."""

    def __init__(self, address: str, count: int) -> None:
        """Joins the cluster at `auto` or `ray://host:port`; `local` starts one of this machine for `count` workers."""
        # Nothing of a run is reported to anyone.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
            import ray.util.client
            import ray.util.scheduling_strategies
        except ImportError:
            text = "nodes are started by Ray, which is not installed"
            hint = "pip install 'surogate[distributed]'; or start each node yourself, with `distributed.node_rank`"
            raise ConfigError(f"{text}\n  hint: {hint}") from None
        self._ray = ray
        self.is_local = address == "local"
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if self.is_local:
            cpus = max(os.cpu_count() or 1, count)
            options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
        _connect(ray, address, options)
        # A client reaches its server, and perhaps nothing else of the head.
        is_client = ray.util.client.ray.is_connected()
        self._head = Head(address.removeprefix("ray://") if is_client else ray.get_runtime_context().gcs_address)
        self._call = Calls(self._head if is_client else None)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NodeLostError):
            self._call(self._ray.shutdown)
        if self._call.is_lost:
            # It would wait for the server when this process ends.
            atexit.unregister(self._ray.shutdown)

    def machines(self) -> list[Machine]:
        """The machines that are alive: the one that this process speaks with first, the others by address."""
        self._head.wait()
        here = self._call(lambda: self._ray.get_runtime_context().get_node_id())
        alive = [node for node in self._call(self._ray.nodes) if node["Alive"]]
        found = [
            Machine(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["NodeManagerHostname"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in alive
        ]
        return sorted(found, key=lambda machine: (machine.id != here, machine.address, machine.id))

    def workers(self, machines: list[Machine], gpus: int, seconds: float) -> Workers:
        """A worker on each, with a CPU and `gpus` GPUs. Errors: the cluster has no room in time, a worker does not answer."""
        workers = self.room(machines, gpus)
        try:
            workers.wait_for_room(seconds)
            workers.start()
        except BaseException:
            workers.close()
            raise
        return workers

    def room(self, machines: list[Machine], gpus: int) -> Workers:
        """The workers of these machines before they are started: their room is requested, and not waited for."""
        return Workers(self._ray, self._call, self._head, machines, gpus, self.is_local)

    def answers(self) -> bool:
        """True if the head of the cluster answers."""
        return self._head.answers()


class Workers:
    """A worker on each of some machines, by number."""

    def __init__(self, ray: Any, call: Calls, head: Head, machines: list[Machine], gpus: int, together: bool) -> None:
        self._ray = ray
        self._call = call
        self._head = head
        self.machines = machines
        self._actors: list[Any] = []
        self._bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        places = [{"ray.io/node-id": machine.id} for machine in machines]
        strategy = "PACK" if together else "STRICT_SPREAD"
        bundles = [self._bundle] * len(machines)
        self._group = call(ray.util.placement_group, bundles, strategy, bundle_label_selector=places)

    def has_room(self, seconds: float) -> bool:
        """True if there is room for all, within a time."""
        return bool(self._call(self._group.wait, seconds))

    def wait_for_room(self, seconds: float) -> None:
        """Errors: there is no room in time; `Lost` if a machine is gone meanwhile."""
        until = time.monotonic() + seconds
        while not self.has_room(min(LOOK, max(0.0, until - time.monotonic()))):
            self.wait_for_head()
            alive = {node["NodeID"] for node in self._call(self._ray.nodes) if node["Alive"]}
            for number, machine in enumerate(self.machines):
                if machine.id not in alive:
                    raise Lost(number, "Ray has lost it")
            if time.monotonic() > until:
                wanted = ", ".join(f"{int(count)} {name}" for name, count in self._bundle.items())
                names = ", ".join(str(machine) for machine in self.machines)
                text = f"Ray gives no room for a worker with {wanted} on each of {names}, waited {seconds:.0f} s"
                raise RunError(f"{text}\n  hint: other jobs use them: see `ray status`")

    def start(self) -> None:
        """Starts the workers in their room."""
        ray = self._ray
        kind = ray.remote(Worker)
        for number in range(len(self.machines)):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
            options = {"max_restarts": 0, "max_concurrency": CALLS, "scheduling_strategy": place}
            resources = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
            self._actors.append(self._call(kind.options(**options, **resources).remote))

    def __len__(self) -> int:
        return len(self.machines)

    def begin(self, number: int, method: str, *arguments: object) -> Any:
        """Calls a method of a worker, and does not wait for it."""
        return self._call(lambda: getattr(self._actors[number], method).remote(*arguments))

    def ask(self, number: int, method: str, *arguments: object) -> Any:
        """The result of a worker's method. Raises `Lost`, or RunError with the message of its exception."""
        return self.answer(number, self.begin(number, method, *arguments), ANSWER)

    def ask_all(self, method: str, *arguments: object) -> list[Any]:
        """The result of a method of every worker."""
        until = time.monotonic() + ANSWER
        begun = [self.begin(number, method, *arguments) for number in range(len(self))]
        return [self.answer(number, call, max(0.1, until - time.monotonic())) for number, call in enumerate(begun)]

    def answer(self, number: int, call: Any, seconds: float) -> Any:
        """The result of a call that was begun."""
        errors = self._ray.exceptions
        until = time.monotonic() + seconds
        try:
            while not self.first([call], min(ASKED, max(0.0, until - time.monotonic()))):
                self.check_head()
                if time.monotonic() > until:
                    raise Lost(number, f"its worker does not answer, waited {seconds:.0f} s")
            return self._call(self._ray.get, call)
        except errors.RayActorError as error:
            if "ModuleNotFoundError" in str(error):
                text = f"{self.machines[number]}: surogate is not installed there: {_last_line(error)}"
                raise RunError(text) from None
            raise Lost(number, f"its worker has ended, as Ray says: {_first_line(error)}") from None
        except errors.RayTaskError as error:
            raise RunError(f"{self.machines[number]}: {error.cause}") from None

    def first(self, calls: list[Any], seconds: float) -> list[Any]:
        """The calls that are done, as soon as there is one."""
        done, _ = self._call(self._ray.wait, calls, num_returns=1, timeout=seconds)
        return list(done)

    def are_done(self, calls: list[Any]) -> bool:
        """True if all calls are done by now."""
        done, _ = self._call(self._ray.wait, calls, num_returns=len(calls), timeout=0.1)
        return len(done) == len(calls)

    def check_head(self) -> None:
        """Raises NodeLostError where the head of the cluster is lost."""
        self._head.check()

    def wait_for_head(self) -> None:
        """Until the head answers. Raises NodeLostError where it is lost."""
        self._head.wait()

    def put_first(self, number: int) -> None:
        """Makes one of them number 0."""
        for of in (self.machines, self._actors):
            of.insert(0, of.pop(number))

    def close(self) -> None:
        """Ends all workers with what they started, and gives their room back."""
        if self._call.is_lost:
            return
        for actor in self._actors:
            self._call(self._ray.kill, actor, no_restart=True)
        self._actors = []
        # Ray does so itself when this process has ended, and waits for ever where it has no head.
        if self._head.answers():
            self._call(self._ray.util.remove_placement_group, self._group)


def _connect(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Starts or joins the cluster. Raises RunError."""
    for left in reversed(range(TRIES if address == "local" else 1)):
        try:
            ray.init(address=address, **options)
            return
        except Exception as error:  # Ray raises plain exceptions, too
            ray.shutdown()
            if left == 0 or "timed out" not in str(error):
                raise RunError(f"{_no_cluster(address)}: {_first_line(error)}") from None


def _no_cluster(address: str) -> str:
    match address:
        case "local":
            return "Ray cannot be started on this machine"
        case "auto":
            return "this machine belongs to no Ray cluster (`distributed.ray_address: auto`; start one: ray start --head)"
        case _:
            return f"no Ray cluster can be reached at `distributed.ray_address: {address}`"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
