"""Checkpoints of a run: saved in the background through Orbax, restored into any layout.

    checkpoints/STEP/state           the arrays: params/<path>, optimizer/<slot>/<path>, counters/<name>
    checkpoints/STEP/about           JSON: configuration, mesh it was written on, data position
    checkpoints/STEP/manifest.json   size and checksums of every other file

The arrays have the model's own names and shapes (layers stacked, scanned or not), so nothing of the mesh, the optimizer
library or the module library shows, and any mesh reads any other's.

A checkpoint is written under another name and gets its own when all of it is on disk, the manifest last. So what has the name of
a step is complete, and what is not as its manifest says was damaged afterwards. Nothing here changes or deletes a damaged
checkpoint; a run that goes on from an older one moves it aside.
"""

import asyncio
import contextlib
import errno
import json
import logging
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Collection
from typing import Any

import jax

from jaxlm import manifest
from jaxlm.config import CheckpointConfig
from jaxlm.errors import RunError
from jaxlm.huggingface.folder import is_folder
from jaxlm.peers import is_of_a_lost_peer
from jaxlm.selection import Selection, match
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten, unflatten

FORMAT = 2                     # 1 had no manifest


class Checkpoints:
    """The checkpoints of one run directory, to read (without `config`) or to read and write."""

    def __init__(self, directory: pathlib.Path, config: CheckpointConfig | None = None, *, gigabytes_at_once: int = 96):
        """`gigabytes_at_once`: of arrays that a process compresses and writes at a time, which takes as much memory again; more
        than the largest piece of an array on one device. (96 is what Orbax has.)"""
        import orbax.checkpoint as ocp

        self._ocp = ocp
        _let_failures_be_one_message()
        self.directory = pathlib.Path(directory).absolute()
        self._config, self._saving = config, 0
        read_only = config is None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if read_only else _Kept(config, self),
            enable_async_checkpointing=not read_only,
            async_options=None if read_only else ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            single_host_load_and_broadcast=False,
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers=dict(state=ocp.StandardCheckpointHandler(save_concurrent_gb=gigabytes_at_once),
                               about=ocp.JsonCheckpointHandler()),
        )

        self._failed: Exception | None = None
        if not read_only and jax.process_count() > 1:
            self._record_failures()

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first. (Orbax's own list has those that failed to be written, too.)"""
        return [int(name) for name in saved_steps(self.directory.parent)]

    def save(self, step: int, state: Any, about: dict[str, Any]) -> None:
        """Starts to save; returns when the arrays have been copied out of the devices' way, or, if not `asynchronous`, when all
        is on disk.

        Args:
          step: a step that is saved already is not saved again.
          state: nested dict of arrays.
          about: what is written beside them; `metrics` in it may hold the one that the best checkpoint is kept by.

        Raises:
          RunError: this save or the one before it failed (no space, no permission); what was saved before is whole.
        """
        if step in self.steps():
            return
        # Asked beforehand: a write that fails half-way makes the libraries wait for minutes, or print a stack for each array.
        need = sum(x.nbytes for x in jax.tree.leaves(state)) // jax.process_count()
        trouble = _of_all_processes([reason] if (reason := self._cannot_write(need)) else [])
        if trouble:                            # all or none begin, or those that did would wait for the others
            self._fail(step, trouble[0])
        args = self._ocp.args.Composite(state=self._ocp.args.StandardSave(state), about=self._ocp.args.JsonSave(about))
        self.wait()            # for the save before, which still needs to know its own step
        self._saving = step
        self._guard(step, lambda: self._manager.save(step, args=args, force=True))
        if not self._config.asynchronous:
            self.wait()

    def _cannot_write(self, need: int) -> str | None:
        """Why this process could not write `need` bytes, if that can be known."""
        free = shutil.disk_usage(self.directory).free
        if free < need:
            return f"no space left on the disk (it takes about {need / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free)"
        probe = self.directory / f".write-{jax.process_index()}"
        try:
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except OSError as error:
            return disk_trouble(error) or str(error)
        return None

    def wait(self) -> None:
        """Waits until the last save is on disk."""
        self._guard(self._saving, self._finish)

    def _finish(self) -> None:
        """Orbax's own wait. In one of several processes it ends as soon as this process's part has failed: Orbax would then wait
        for the others for minutes, which wait for this one meanwhile."""
        if jax.process_count() == 1:
            self._manager.wait_until_finished()
            return
        waiting = threading.Thread(target=self._wait_and_record, name="save", daemon=True)
        waiting.start()
        while waiting.is_alive() and self._failed is None:
            waiting.join(0.05)
        if self._failed is not None:
            raise self._failed

    def _wait_and_record(self) -> None:
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that asked
            self._failed = self._failed or error

    def _record_failures(self) -> None:
        """Keeps what the background thread of a save raises. (Orbax hands it to a thread of its own, which keeps it to itself
        until all processes have met.)"""
        writer = self._manager._checkpointer._async_manager
        check = writer.check_for_errors

        def recorded():
            try:
                check()
            except Exception as error:
                self._failed = error
                raise

        writer.check_for_errors = recorded

    def _guard(self, step: int, action: Callable[[], Any]) -> None:
        try:
            action()
            self._manager.check_for_errors()
        except Exception as error:  # noqa: BLE001 - tensorstore reports a full disk as ValueError, Orbax wraps it
            reason = disk_trouble(error)
            if reason is None:
                raise
            if jax.process_count() == 1:       # what there is of it takes room, and helps nobody
                shutil.rmtree(self.directory / f"{step}.orbax-checkpoint-tmp", ignore_errors=True)
            self._fail(step, reason, error)

    def _fail(self, step: int, reason: str, error: Exception | None = None):
        self._manager.reload()                 # it counts the one that failed, and would delete an older one for it
        kept = ", ".join(map(str, self.steps())) or "none"
        raise RunError(
            f"the checkpoint of step {step} could not be written below {self.directory}: {reason}. "
            f"Checkpoints that are whole: {kept}. Make room and run the same command again; it resumes from the newest of them."
        ) from error

    def _write_manifest(self) -> None:
        """Called in the background by process 0, when all processes have written and the checkpoint has not its name yet."""
        manifest.write(self.directory / f"{self._saving}.orbax-checkpoint-tmp")

    def damage(self, step: int) -> list[str] | None:
        """What is not as it was written, a line for each; None if nothing can be said, since the checkpoint is of the first
        format. Every process of a job must call it: each reads its share of the bytes, and all get all the lines.
        """
        folder = self.directory / str(step)
        about = _about(folder)
        if not (folder / manifest.NAME).exists() and about.get("format") == 1:
            return None
        found = manifest.verify(folder, jax.process_index(), jax.process_count())
        if about.get("step", step) != step:
            found.append(f"it is that of step {about['step']}, under another name")
        found = sorted(set(_of_all_processes(found)))
        if not found and about.get("format", FORMAT) > FORMAT:
            raise RunError(f"{folder} is of format {about['format']}, and this program knows {FORMAT} and older; read it with "
                           "the version that wrote it, or a newer one. Nothing was changed.")
        return found

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step, or none, if they cannot be read."""
        with contextlib.suppress(RunError):
            return self.about(step).get("metrics") or {}
        return {}

    def restore(self, step: int, abstract: Any, selection: "Selection | None" = None) -> Any:
        """Reads arrays of a step.

        Args:
          abstract: nested dict of ShapeDtypeStruct, with the shapes, dtypes and shardings that they are to have: the whole state,
            or some of its groups (params, optimizer, counters); the others stay on disk.
          selection: what is called otherwise there, and which arrays to leave out of the result.

        Raises:
          DeclarationError: the checkpoint's arrays are not the ones asked for.
          RunError: it cannot be read.
        """
        theirs = self.check(step, abstract, selection)
        wanted = flatten(abstract)
        found = flatten(self._read(step, unflatten({theirs[path]: wanted[path] for path in theirs})))
        return unflatten({path: found[theirs[path]] for path in theirs})

    def read(self, step: int, names: Collection[str]) -> dict[str, jax.Array]:
        """Some arrays by name ('params/embed/embedding'), whole, on the first device of this process."""
        shapes, place = self.shapes(step), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {name: jax.ShapeDtypeStruct(*shapes[name], sharding=place) for name in names}
        return flatten(self._read(step, unflatten(wanted)))

    def open(self, step: int, name: str) -> Any:
        """An array by name as a tensorstore, to be read piece by piece: `[index].read().result()`."""
        import tensorstore

        state = self.directory / str(step) / "state"
        base = {"driver": "ocdbt", "base": f"file://{state}/"}
        with self._reading(step):
            return tensorstore.open({"driver": "zarr", "kvstore": {**base, "path": name.replace("/", ".") + "/"}}, open=True,
                                    read=True).result()

    def _read(self, step: int, abstract: Any) -> Any:
        """The arrays of a nested dict of ShapeDtypeStruct, with their shardings, and no others."""
        ocp = self._ocp
        args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype), abstract)
        with self._reading(step), ocp.PyTreeCheckpointer() as reader:
            return reader.restore(
                self.directory / str(step) / "state",
                args=ocp.args.PyTreeRestore(item=abstract, restore_args=args, partial_restore=True),
            )

    def about(self, step: int) -> dict[str, Any]:
        """What is written beside the arrays of a step."""
        with self._reading(step):
            return json.loads((self.directory / str(step) / "about" / "metadata").read_text("utf-8"))

    def shapes(self, step: int) -> dict[str, tuple]:
        """Path to (shape, dtype) of every array of a step, as stored."""
        with self._reading(step):
            found = self._manager.item_metadata(step)["state"]
        return {_path(keys): (tuple(leaf.shape), str(leaf.dtype)) for keys, leaf in jax.tree_util.tree_leaves_with_path(found)}

    @contextlib.contextmanager
    def _reading(self, step: int):
        """Turns what the libraries below say of an unreadable checkpoint into one message."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - damage comes out of the libraries as any kind of exception
            if jax.process_count() > 1 and is_of_a_lost_peer(error):
                raise                          # the checkpoint is whole: `Peers.ending_is_told` has the words for this
            reason = str(error).partition(" [tensorstore_spec")[0]
            raise RunError(
                f"{self.directory / str(step)} cannot be read: {reason}. Nothing was changed. To go on from an older "
                "checkpoint, move this one away; other checkpoints here: "
                f"{', '.join(str(s) for s in self.steps() if s != step) or 'none'}."
            ) from error

    def check(self, step: int, abstract: Any, selection: "Selection | None" = None) -> dict[str, str]:
        """Compares the arrays of a step, as far as `abstract` has their group, with the shapes that are asked for. Reads none.

        Returns:
          For each array that `restore` would read its name in the checkpoint.

        Raises:
          DeclarationError: an array is missing, has another shape or is unknown; the message lists them.
          RunError: the checkpoint cannot be read.
        """
        shapes = {path: shape for path, (shape, _) in self.shapes(step).items()}
        return match(shapes, abstract, selection or Selection(), str(self.directory / str(step)))

    def close(self) -> None:
        """Waits for the last save and frees the threads."""
        self.wait()
        self._manager.close()


class _Kept:
    """Which checkpoints stay when a new one is complete: the newest `keep`, the newest at a multiple of `every` (a rollback goes
    back to it), every one whose step is a multiple of `keep_every`, and the best by `best_metric`. In the form of Orbax's
    preservation policies."""

    def __init__(self, config: CheckpointConfig, checkpoints: Checkpoints):
        self._config, self._checkpoints = config, checkpoints

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        """For each checkpoint (they have a `step`), whether it stays."""
        del context
        steps, config = [checkpoint.step for checkpoint in checkpoints], self._config
        whole = sorted({*self._checkpoints.steps(), max(steps, default=0)} & {*steps})      # the newest is being written
        kept = set(whole[-config.keep:])
        if config.every:
            kept |= set([step for step in whole if step % config.every == 0][-1:])
        if config.keep_every:
            kept |= {step for step in steps if step % config.keep_every == 0}
        if config.best_metric:
            values = {step: self._checkpoints.metrics(step).get(config.best_metric) for step in whole[:-1]}
            values = {step: value for step, value in values.items() if value is not None and value == value}      # no NaN
            if values:
                kept.add((min if config.best_mode == "min" else max)(values, key=values.get))
        return [step in kept for step in steps]


def _about(folder: pathlib.Path) -> dict[str, Any]:
    """What is written beside the arrays of a checkpoint, or nothing, if that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "about" / "metadata").read_text("utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _of_all_processes(lines: list[str]) -> list[str]:
    """The lines of every process, in each of them."""
    if jax.process_count() == 1:
        return lines
    import numpy as np
    from jax.experimental import multihost_utils

    text = np.frombuffer("\n".join(lines).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.array(text.size, np.int32)).max())
    texts = multihost_utils.process_allgather(np.pad(text, (0, longest - text.size)))
    return [line for row in texts for line in row.tobytes().rstrip(b"\0").decode().splitlines()]


def _path(keys) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)


class _QuietLoop(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, callback, *args, context=None):
        if self.is_closed():
            return None
        return super().call_soon_threadsafe(callback, *args, context=context)


class _QuietPolicy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _QuietLoop


def _let_failures_be_one_message() -> None:
    """When one array of a checkpoint cannot be read or written, Orbax closes its event loop on the others; tensorstore then
    reports each of them to the closed loop and prints a stack for each. What failed is raised anyway."""
    if not isinstance(asyncio.get_event_loop_policy(), _QuietPolicy):
        asyncio.set_event_loop_policy(_QuietPolicy())
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def disk_trouble(error: BaseException | None) -> str | None:
    """'no space left on device' or the like, if that is what lies at the bottom of an error."""
    while error is not None:
        text = str(error).lower()
        if (
            getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            or "no space left" in text
            or "disk quota" in text
            or "resource_exhausted" in text
            and "write" in text
        ):
            return "no space left on the disk"
        if getattr(error, "errno", None) == errno.EFBIG or "file too large" in text:
            return "a file may not grow that large (see `ulimit -f`)"
        if (
            getattr(error, "errno", None) in (errno.EACCES, errno.EROFS, errno.EPERM)
            or "permission denied" in text
            or "read-only file system" in text
        ):
            return "no permission to write"
        error = error.__cause__ or error.__context__
    return None


def find_source(source: str) -> tuple[pathlib.Path, int | None]:
    """A run directory, its checkpoints folder or one checkpoint, as (run directory, step or None).

    Raises:
      DeclarationError: there is no such thing.
    """
    path = pathlib.Path(source)
    if path.name.isdigit() and path.parent.name == "checkpoints":
        path, step = path.parent.parent, int(path.name)
    else:
        step = None
    if path.name == "checkpoints":
        path = path.parent
    if is_folder(path):
        raise DeclarationError(f"{source} is a Hugging Face folder, and no run directory; `python -m jaxlm.convert from-hf` "
                               "makes one of it.")
    if not (path / "config.json").is_file():
        raise DeclarationError(
            f"{source} is no run directory (there is no {path / 'config.json'}); "
            "give the --workdir of a run, or one of its checkpoints (generate and evaluate take a Hugging Face folder, too)."
        )
    if step is not None and not (path / "checkpoints" / str(step)).is_dir():
        raise DeclarationError(
            f"{source} does not exist; {path / 'checkpoints'} holds: {', '.join(saved_steps(path)) or 'nothing'}."
        )
    return path, step


def set_aside_names(workdir: pathlib.Path) -> list[str]:
    """Names of the checkpoints that a run has moved aside: damaged ones, and those that a rollback went back behind."""
    folder = workdir / "checkpoints"
    return sorted(p.name for p in folder.iterdir() if re.search(r"\.(damaged|rolled_back)", p.name)) if folder.is_dir() else []


def saved_steps(workdir: pathlib.Path) -> list[str]:
    """Names of the checkpoint folders of a run, oldest first, without opening them."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((name for name in names if re.fullmatch(r"0|[1-9][0-9]*", name)), key=int)
