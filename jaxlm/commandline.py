"""What every command shares: the flags, the configuration behind `--config`, and the exit codes.

    0 finished    2 the user's input is wrong    3 stopped on request, after saving    1 anything else

A command is a function of its parsed flags; `run` gives it those flags and turns its errors into one clear message.
"""

import argparse
import importlib.util
import json
import logging
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence

from jaxlm import xla_flags
from jaxlm.config import Config, to_config, with_architecture, with_preset
from jaxlm.presets import over, shipped_presets, without_preset
from jaxlm.errors import last_words
from jaxlm.huggingface import configured as configured_architecture
from jaxlm.huggingface.folder import is_folder
from partitioning.declaration import DeclarationError, annotation_of, keys, nearest, parse

COMMANDS = {
    "jaxlm.train": "train a model; the same --workdir resumes",
    "jaxlm.evaluate": "loss, perplexity and bits per byte of a checkpoint on a data set",
    "jaxlm.generate": "text from a checkpoint",
    "jaxlm.convert": "Hugging Face weights in and out",
    "jaxlm.checkpoint": "list, show, verify, copy or export what a run has saved",
    "jaxlm.tokenize": "a corpus into a token cache, or a tokenizer from a corpus",
    "jaxlm.data": "a look at the examples that training would see",
    "jaxlm.explain": "every array's shape, dims, sharding and bytes per device, and why",
}


def shipped_configs() -> dict[str, pathlib.Path]:
    """Name to file of the configurations that come with the package."""
    import configs

    return {
        path.stem: path
        for folder in configs.__path__
        for path in sorted(pathlib.Path(folder).glob("*.py"))
        if not path.stem.startswith("_")
    }


def load_config(source: str | None, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Reads a configuration by shipped name or path (.py with `get_config()`, or a run's config.json), with overrides.

    Args:
      source: a shipped name such as 'shakespeare', a Python file, or a JSON file; None: the defaults.
      overrides: pairs (dotted key below config, text of the value), applied in order.

    Raises:
      DeclarationError: the file is missing or fails, or a key or value is wrong.
    """
    values, changes = {} if source is None else _read_config(source), []
    for dotted, text in overrides:
        annotation, inside = annotation_of(Config, dotted)
        if hasattr(annotation, "__dataclass_fields__"):
            raise DeclarationError(f"config.{dotted} is a section; set its keys, e.g. --config.{dotted}.KEY=VALUE.")
        changes.append((dotted, parse(annotation, text, f"config.{dotted}")))
    named = dict(changes)
    if "sharding.preset" in named:  # instead of the file's own; over the file, and under the rest of the command line
        values = without_preset(values)
    values = with_preset(values)
    if named.get("sharding.preset") is not None:
        values = over(values, named["sharding.preset"])
    values = with_architecture(values)
    if named.get("model.from_hf") is not None:  # over the file, and under the rest of the command line
        values = configured_architecture.over(values, named["model.from_hf"])
    for dotted, value in changes:
        if dotted in ("sharding.preset", "model.from_hf"):
            continue
        place = values
        names = dotted.split(".")
        for name in names[:-1]:
            if place.get(name) is None:  # a dict leaf that is None, or a section that a JSON file lacks
                place[name] = {}
            place = place[name]
        place[names[-1]] = value
    return to_config(values)


def configured(source: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """`load_config` of a command's --config, which must have been given."""
    if source is None:
        raise DeclarationError(
            "which configuration? Pass --config=NAME or --config=FILE.py; shipped names: " + ", ".join(shipped_configs()) + "."
        )
    return load_config(source, overrides)


def _read_config(source: str):
    shipped = shipped_configs()
    path = shipped.get(source, pathlib.Path(source))
    if is_folder(path):
        return {"model": {"from_hf": source}}
    if not path.is_file():
        raise DeclarationError(_no_configuration(source, path, shipped))
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise DeclarationError(f"{path} is no JSON file: {error}.") from None
    if path.suffix != ".py":
        raise DeclarationError(
            f"--config={source}: expected a .py file that defines get_config(), a run's config.json, "
            f"or one of: {', '.join(shipped)}."
        )
    spec = importlib.util.spec_from_file_location(f"jaxlm_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if get_config is None:
            raise DeclarationError(
                f"{path} defines no get_config(); a config file is a function that returns "
                "jaxlm.config.default_config() with changes."
            )
        return get_config()
    except DeclarationError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own file: show where it fails, not our stack
        raise DeclarationError(f"{path}{_line_in(error, path)} failed: {type(error).__name__}: {error}") from None


def _no_configuration(source: str, path: pathlib.Path, shipped) -> str:
    for file in (path.with_name(path.name + ".py"), path / "config.json"):
        if file.is_file():
            return f"no configuration {source!r}; did you mean --config={file}?"
    return f"no configuration {source!r}: it is neither a file nor a shipped name; {nearest(source, shipped)}"


def _line_in(error: BaseException, path: pathlib.Path) -> str:
    """':LINE' of the last frame that lies in the user's file."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""


def config_help(config: Config) -> str:
    """Every key with its type, its value in `config` (and its default where that differs) and one line of meaning."""
    lines = []
    for key in keys(Config):
        _, section, name = key.name.split(".")
        value = getattr(getattr(config, section), name)
        shown = f"default {key.default!r}" if value == key.default else f"{value!r}; default {key.default!r}"
        lines += [f"--{key.name}  ({key.type}; {shown})", f"    {key.meaning}"]
    return "\n".join(lines)


def parser(command: str, description: str, *, config: bool = True) -> argparse.ArgumentParser:
    """An argument parser with the flags that every command has."""
    epilog = ["commands:", *(f"  python -m {name:16} {meaning}" for name, meaning in COMMANDS.items())]
    if config:
        epilog += [
            "",
            "shipped configurations:",
            "  " + ", ".join(shipped_configs()),
            "shipped presets of mesh and sharding (--config.sharding.preset=NAME):",
            "  " + ", ".join(shipped_presets()),
            "",
            "--config.SECTION.KEY=VALUE overrides one value; --config.help lists every key.",
        ]
    out = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        epilog="\n".join(epilog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if config:
        out.add_argument(
            "--config", metavar="NAME|PATH", help="a shipped name, a .py file with get_config(), or a run's config.json"
        )
    out.add_argument("--simulate_devices", type=int, metavar="N", help="run on N simulated CPU devices")
    return out


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--config.a.b=v` and `--config.a.b v` out of the arguments."""
    rest, overrides, i = [], [], 0
    while i < len(argv):
        word = argv[i]
        if word.startswith("--config."):
            name, equals, text = word[len("--config.") :].partition("=")
            if not equals:
                i += 1
                if i == len(argv) or argv[i].startswith("--"):
                    raise DeclarationError(f"{word} has no value; write {word}=VALUE.")
                text = argv[i]
            overrides.append((name, text))
        else:
            rest.append(word)
        i += 1
    return rest, overrides


def simulate_devices(count: int | None) -> None:
    """Makes JAX show `count` CPU devices. Must come before anything asks JAX for its devices."""
    if count is None:
        return
    if count < 1:
        raise DeclarationError(f"--simulate_devices={count}; expected at least 1.")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    xla_flags.add(xla_flags.SIMULATION_FLAGS)


def skip_cuda_without_gpu(environ: MutableMapping[str, str] = os.environ) -> None:
    """Where JAX's CUDA plugin is installed to compile for GPUs and there is none, keeps JAX from trying to start it, which ends
    in a stack trace before it goes on with the CPU. What the user says in JAX_PLATFORMS stands."""
    if (
        xla_flags.has_cuda_plugin()
        and not xla_flags.has_nvidia_gpu()
        and importlib.util.find_spec("libtpu") is None
        and not environ.get("JAX_PLATFORMS")
    ):
        environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:  # it has read the variable already
            sys.modules["jax"].config.update("jax_platforms", "cpu")


def _interrupt(number, frame):
    """Ends the command where it stands. An exception would be lost if it were raised inside a destructor or a callback of the
    garbage collector, and a compile that is under way in a thread cannot be called off."""
    status, words = last_words(KeyboardInterrupt())
    print(words, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


def run(
    main: Callable[[argparse.Namespace], int | None], arguments: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> int:
    """Parses the flags, calls `main` with them (`flags.overrides` holds the --config.* pairs) and returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # until a loop that has something to save takes over
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it raises as well, stack by stack
    try:
        if "--config.help" in argv:
            given = [word.partition("=")[2] for word in argv if word.startswith("--config=")]
            print(config_help(load_config(given[0]) if given else Config()))
            return 0
        rest, overrides = _split_overrides(argv)
        flags, unknown = arguments.parse_known_args(rest)
        if unknown:
            known = [word for action in arguments._actions for word in action.option_strings if word.startswith("--")]
            hint = nearest(unknown[0].partition("=")[0], known, "flag")
            if not unknown[0].startswith("-"):
                hint = "an unquoted * becomes several words: quote the pattern."
            raise DeclarationError(f"unknown argument {unknown[0]!r}: {hint}")
        flags.overrides = overrides
        skip_cuda_without_gpu()
        simulate_devices(flags.simulate_devices)
        return main(flags) or 0
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _interrupt(signal.SIGINT, None)
        end = last_words(error)
        if end is None:
            raise
        print(end[1], file=sys.stderr, flush=True)
        return end[0]
