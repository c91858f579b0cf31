"""What saving and loading lets stock DeepSpeed do, and by what stock reads and writes files, for the active stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_bamboo.runtime.stock.attributes import COUNTERS
from deepspeed_bamboo.runtime.stock.beside_tied import accept_beside_tied_weights, beside_tied_weights
from deepspeed_bamboo.runtime.stock.patches.tied_weights import tied_weights_from_files
from deepspeed_bamboo.runtime.stock.scheduler_state import NumbersBefore, SetScheduler


class FileMethods(Protocol):
    """Methods of stock's engine, without what the plugin's overrides: as ``super()`` has them."""

    def save_checkpoint(self, save_dir: str, **options: Any) -> Any:
        """Save all stages; calls ``_save_checkpoint`` of the whole engine."""

    def load_checkpoint(self, load_dir: str, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        """Load the active stage; calls ``_load_checkpoint`` of the whole engine."""

    def load_universal_checkpoint(self) -> bool:
        """Whether files of another layout are read."""

    def zero_optimization(self) -> bool:
        """Whether pipelines share the state of an optimizer."""

    def _create_checkpoint_file(self, save_dir: str, tag: str, zero_checkpoint: bool) -> Any: ...
    def _save_checkpoint(self, save_dir: str, tag: str, **options: Any) -> Any: ...
    def _save_zero_checkpoint(self, save_path: str, tag: str) -> Any: ...
    def _load_checkpoint(self, load_dir: str, tag: str, **options: Any) -> tuple[str | None, Any]: ...
    def _load_zero_checkpoint(self, load_dir: str, tag: str) -> Any: ...


class StockFiles:
    """The methods of stock's engine that save and load.

    Args:
        engine: has them.
        attributes: the engine's, of its active stage and of the process.
    """

    def __init__(self, engine: FileMethods, *, attributes: MutableMapping[str, Any]) -> None:
        self._engine = engine
        self._attributes = attributes

    @property
    def checkpoint_engine(self) -> Any:
        """What stock reads and writes files by."""
        return self._attributes["checkpoint_engine"]

    @checkpoint_engine.setter
    def checkpoint_engine(self, value: Any) -> None:
        self._attributes["checkpoint_engine"] = value

    @contextmanager
    def through(self, files: Any) -> Iterator[None]:
        """Inside, stock reads and writes by ``files``."""
        before, self.checkpoint_engine = self.checkpoint_engine, files
        try:
            yield
        finally:
            self.checkpoint_engine = before

    @property
    def reads_universal(self) -> bool:
        """Whether files of another layout are read."""
        return bool(self._engine.load_universal_checkpoint())

    @property
    def stages(self) -> tuple[int, int]:
        """The active stage, and how many a pipeline has."""
        return int(self._attributes["stage_id"]), int(self._attributes["num_stages"])

    def counters(self) -> dict[str, Any]:
        """What stock counts in its optimizer steps."""
        return {name: self._attributes[name] for name in COUNTERS}

    def count(self, counters: Mapping[str, Any]) -> None:
        """Inverse of :meth:`counters`, on a worker that loads nothing itself."""
        self._attributes.update(counters)

    def save(self, folder: str, **options: Any) -> None:
        """Stock's ``save_checkpoint``, which asks the engine for the files in its middle."""
        self._engine.save_checkpoint(folder, **options)

    def save_stage(
        self, folder: str, tag: str, *, client_state: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Write the files of the active stage, those of ZeRO included."""
        state = {**(client_state or {}), **beside_tied_weights(self._attributes["module"])}
        self._engine._create_checkpoint_file(folder, tag, False)
        self._engine._save_checkpoint(folder, tag, client_state=state, **options)
        if self._attributes["save_zero_checkpoint"]:
            self._engine._save_zero_checkpoint(folder, tag)

    @contextmanager
    def scheduler_or(self, other: Any) -> Iterator[None]:
        """Inside, stock writes the state of the scheduler ``other`` where the active stage has none of its own."""
        before = self._attributes["lr_scheduler"]
        self._attributes["lr_scheduler"] = other if before is None else before
        try:
            yield
        finally:
            self._attributes["lr_scheduler"] = before

    def load_stage(
        self, module: Any, folder: str, *arguments: Any, numbers: NumbersBefore | None = None, **options: Any
    ) -> tuple[str | None, Any]:
        """Stock's ``load_checkpoint`` for the active stage, whose layers are in ``module``.

        ``numbers``: of schedulers, as they were before the first attempt of this load.
        """
        if numbers is not None:
            numbers.again(self._attributes["lr_scheduler"])
        with tied_weights_from_files(module, folder=lambda: self._attributes["_curr_ckpt_path"], read=self._read):
            return self._engine.load_checkpoint(folder, *arguments, **options)

    def _read(self, path: str, **options: Any) -> Any:
        return self.checkpoint_engine.load(path, **options)

    @contextmanager
    def setting_schedulers(self) -> Iterator[None]:
        """Inside, the active stage's scheduler is set to what stock loads, whatever it has counted before."""
        before = self._attributes["lr_scheduler"]
        if before is not None:
            self._attributes["lr_scheduler"] = SetScheduler(before)
        try:
            yield
        finally:
            self._attributes["lr_scheduler"] = before

    def load_files(
        self, folder: str, tag: str, *, load_optimizer_states: bool, load_module_only: bool, **options: Any
    ) -> tuple[str | None, Any]:
        """Stock's ``_load_checkpoint``, without the optimizer where :meth:`load_optimizer_apart` is to read it."""
        path, client_state = self._engine._load_checkpoint(
            folder,
            tag,
            load_optimizer_states=load_optimizer_states and not self._reads_optimizer_apart,
            load_module_only=load_module_only,
            **options,
        )
        accept_beside_tied_weights(self._attributes["module"], client_state)
        return path, client_state

    def load_optimizer_apart(self, folder: str, tag: str, client_state: Any, *, load_optimizer_states: bool) -> None:
        """After :meth:`load_files`: for bf16 without ZeRO what stock (0.19.8) stumbles over, though it saves it:
        KeyError: 0.

        The bf16 optimizer is saved in files by pipeline as ZeRO is, and has to be read from them as ZeRO is.
        """
        if not self._reads_optimizer_apart:
            return
        if isinstance(client_state, dict) and load_optimizer_states:
            client_state.pop("optimizer", None)  # it was read by another way, so it is no state of the user's
        if not (load_optimizer_states and self._engine._load_zero_checkpoint(folder, tag)):
            self._attributes["optimizer"]._restore_from_bit16_weights()

    @property
    def _reads_optimizer_apart(self) -> bool:
        return isinstance(self._attributes["optimizer"], BF16_Optimizer) and not self._engine.zero_optimization()
