"""The models that requests name, and which of them are on the device: a base with several adapters, or one model at a time.

Knows folders and slots; not requests.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

from ..cli import generate
from ..cli.arguments import UsageError
from ..convert import export
from ..errors import ConfigError, SurogateError
from ..model import Model, load
from ..rewards.scores import is_reward_model, refuse, with_score
from ..storage import hub
from ..terminal import warn

#: Checkpoints of a run, which are models of their own.
CHECKPOINT = re.compile(r"checkpoint-(\d+)")

#: Slots for checkpoints of a run, by default.
CHECKPOINTS = 2

#: A model's folder or name, and its adapter.
Place = tuple[str, Path | None]

#: A file of weights as it is now.
Version = tuple[int, int, int]

#: A name with the version of its adapter, None without one.
Key = tuple[str, Version | None]


class Models:
    """Loads what requests name."""

    def __init__(self, options: Namespace, adapters: dict[str, str]) -> None:
        self._options = options
        self._run = Path(options.model).expanduser()
        self._base, adapter = generate.places(options.model, options.adapter, options.base)
        self._places: dict[str, Place] = {self._run.name or options.model: (self._base, adapter)}
        for name, place in adapters.items():
            if name in self._places:
                raise UsageError(f"--adapters {name}: this is the name of the model")
            self._places[name] = generate.places(self._base, place, None)
        #: The base, with slots; None where one model is loaded at a time.
        self._shared: Model | None = None
        #: The adapter in each slot, that of the last request last.
        self._slots: dict[int, Key | None] = {}
        #: Adapters that cannot be in a slot.
        self._apart: set[Key] = set()
        #: The model that is loaded by itself, and its folder or name.
        self._alone: tuple[tuple[Key, str], Model] | None = None

    @property
    def first(self) -> str:
        """The model of the command."""
        return next(iter(self._places))

    def names(self) -> list[str]:
        """The models that a request may name: that of the command, adapters, and checkpoints that a run has by now."""
        return [*self._places, *sorted(self._checkpoints(), key=lambda name: int(name.rpartition("-")[2]))]

    def _checkpoints(self) -> dict[str, Path]:
        folders = self._run.glob("checkpoint-*") if self._is_run() else []
        return {path.name: path for path in folders if CHECKPOINT.fullmatch(path.name) and path.is_dir()}

    def _is_run(self) -> bool:
        return (self._run / "manifest.json").is_file()

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._checkpoints()

    def _place(self, name: str) -> Place:
        if name == self.first and self._is_run():
            # Its newest checkpoint gives way to the next one, and that to the result.
            return generate.places(self._options.model, self._options.adapter, self._options.base)
        if name in self._places:
            return self._places[name]
        folder = self._checkpoints().get(name)
        if folder is None:
            raise ConfigError(f"the model `{name}` is no longer there")
        return generate.places(str(export.result(folder)), None, self._options.base)

    def load_first(self) -> None:
        """Makes slots for the adapters of the command, and loads its model. What cannot be in a slot is told."""
        adapters = {name: adapter for name, (_, adapter) in self._places.items() if adapter is not None}
        is_growing = self._is_run() and self._places[self.first][1] is not None
        most = self._options.max_adapters
        first = self._places[self.first][1]
        fields = hub.model_config(hub.folder(self._base))
        if is_reward_model(fields if first is None else with_score(fields, first)):
            raise refuse("serve")
        if (adapters or is_growing) and most != 0:
            model = self._load(self._base, None)
            together = {name: adapter for name, adapter in adapters.items() if self._can_share(model, name, adapter)}
            slots = len(together) + (CHECKPOINTS if is_growing else 0) if most is None else most
            if together:
                model.share([*together.values()], slots)
                self._shared, self._slots = model, dict.fromkeys(range(1, slots + 1))
        self.use(self.first, ())

    def _can_share(self, model: Model, name: str, adapter: Path) -> bool:
        """True if an adapter can be in a slot. What cannot is told, and loaded by itself when a request names it."""
        try:
            why = model.obstacle(adapter)
        except SurogateError as error:
            if name == self.first:
                raise
            warn(f"surogate: the adapter `{name}` cannot be used: {error}")
            return False
        if why is not None:
            self._tell(name, adapter, why)
        return why is None

    def _tell(self, name: str, adapter: Path, why: str) -> None:
        self._apart.add((name, _version(adapter)))
        hint = "requests for it wait for the others, and it is loaded again each time"
        warn(f"surogate: the adapter `{name}` is not on the device together with others, because {why}: {hint}")

    def use(self, name: str, busy: Collection[int]) -> tuple[Model, int] | None:
        """The model that answers for a name, and the slot of its adapter there; 0 for none. `busy`: the slots of the answers
        that run. None where these must end first. Errors: a model that cannot be loaded."""
        model, adapter = self._place(name)
        key = name, None if adapter is None else _version(adapter)
        if self._shared is not None and model == self._base:
            if adapter is None:
                return (self._shared, 0) if self._makes_room(busy) else None
            if key not in self._apart:
                slot = self._slot(key, busy)
                if slot is None or not self._makes_room(busy):
                    return None
                if self._slots[slot] == key or (why := self._shared.place(slot, adapter)) is None:
                    del self._slots[slot]
                    self._slots[slot] = key
                    return self._shared, slot
                self._tell(name, adapter, why)
        if self._alone is not None and self._alone[0] == (key, model):
            return self._alone[1], 0
        if busy:
            return None
        if self._shared is not None:
            if adapter is not None and model == self._base:
                # Raises before what is loaded is given up.
                self._shared.obstacle(adapter)
            self._shared.unload()
            self._slots = dict.fromkeys(self._slots)
        self._unload()
        self._alone = (key, model), self._load(model, adapter)
        return self._alone[1], 0

    def _slot(self, key: Key, busy: Collection[int]) -> int | None:
        """The slot that has an adapter, or else a free one, or else the one that was used least recently."""
        free = [slot for slot in self._slots if slot not in busy]
        known = [slot for slot, of in self._slots.items() if of == key]
        return next(iter([*known, *(slot for slot in free if self._slots[slot] is None), *free]), None)

    def _makes_room(self, busy: Collection[int]) -> bool:
        """Unloads what is loaded by itself, unless it answers."""
        if self._alone is not None and busy:
            return False
        self._unload()
        return True

    def _unload(self) -> None:
        if self._alone is not None:
            self._alone[1].unload()
            self._alone = None

    def _load(self, model: str, adapter: Path | None) -> Model:
        return load(model, adapter, device=self._options.device, dtype=self._options.dtype)


def _version(adapter: Path) -> Version:
    """The weights of an adapter as they are now: another file is another adapter."""
    try:
        found = (adapter / "adapter_model.safetensors").stat()
    except FileNotFoundError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
