"""What this runtime still needs, as pinned commands in the right order; prints them, runs them.

    python -m colabtpu install [--engine auto|tensorflow|jax] [--dry-run] [--json]

    from colabtpu import install             # in a notebook: knows what the kernel has imported
    install.install("jax")

Nothing preinstalled is touched without need: a command stands in the plan only while something
is missing, outside the tried range, or in the way, so a second run has nothing to do.

Why not one requirements file: stock `tensorflow` overwrites tensorflow-tpu, and keras-hub and
tensorflow-text ask pip for it, so on a TPU they go in with --no-deps; and pip would take a
libtpu that is too new for tensorflow-tpu 2.20.0.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from colabtpu import catalogue, checks
from colabtpu import environment as surroundings
from colabtpu.doctor import ENGINES, choose_engine, diagnose
from colabtpu.environment import Environment
from colabtpu.errors import ColabTPUError

LIBTPU = f"libtpu{checks.LIBTPU_SPECIFIER}"

# distribution -> (the range that was tried, what to install where it is not met). The lower ends
# are what Colab's and Kaggle's images ship, so that those are left alone.
_ANY_ENGINE = {
    "tensorboard": (">=2.20,<2.21", "tensorboard==2.20.0"),
    "setuptools": (">=40,<82", "setuptools>=70,<82"),
    "tokenizers": (">=0.20,<0.24", "tokenizers>=0.22,<0.23"),
    "tensorflow-datasets": (">=4.9.9,<4.10", "tensorflow-datasets>=4.9.10,<4.10"),
    "importlib-resources": (">=5", "importlib_resources>=6.4"),
    "array-record": (">=0.8,<0.9", "array-record>=0.8.1,<0.9"),
    "ipywidgets": (">=7.7.1,<9", "ipywidgets>=7.7.1,<9"),
    "matplotlib": (">=3.8,<4", "matplotlib>=3.9,<3.11"),
    "safetensors": (">=0.4,<0.9", "safetensors>=0.5,<0.9"),
    "rich": (">=13.7,<16", "rich>=13.7,<16"),
}
# What keras-hub 0.32 needs besides tensorflow-text, which --no-deps leaves out.
_KERAS_HUB_NEEDS = {
    "regex": (">=2022", "regex"),
    "sentencepiece": (">=0.2", "sentencepiece>=0.2"),
    "kagglehub": (">=0.3", "kagglehub>=1.0.2"),
    "kagglesdk": (">=0.1.28", "kagglesdk==0.1.28"),
}
_KERAS = (">=3.13.2,<3.16", "keras>=3.15.1,<3.16")
_KERAS_HUB = "keras-hub==0.32.0"
_TENSORFLOW_TPU = "tensorflow-tpu==2.20.0"
_TENSORFLOW_TEXT = "tensorflow-text==2.20.1"
_TENSORFLOW = ">=2.20.0,<2.21"
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")
_JAX = ">=0.7.2,<0.8"


@dataclass(frozen=True)
class Command:
    """One call of pip: its words after `pip`, and why it is needed."""

    words: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return shlex.join(("pip", *self.words))


def plan(environment: Environment, engine: str = "auto") -> tuple[Command, ...]:
    """Returns the commands that make this runtime ready for one engine; none where it is.

    Args:
        environment: what is there.
        engine: `"tensorflow"`, `"jax"`, or `"auto"` for the one that the doctor takes.

    Returns:
        The commands, in the order in which they must run.

    Raises:
        InvalidArgumentError: no such engine.
        ColabTPUError: the engine cannot run on this device at all.
    """
    engine, _ = choose_engine(environment, engine)
    commands = {"tensorflow": _tensorflow, "jax": _jax}[engine](environment)
    return tuple(c for c in (*commands, *_keras(environment, engine), *_common(environment)) if c)


def restart_reason(environment: Environment, commands: tuple[Command, ...]) -> str | None:
    """Returns why the kernel must be restarted after `commands`, `None` if it need not be.

    A process keeps the build that it has imported, whatever is on the disk.
    """
    touched = {_name(w) for c in commands for w in c.words[1:] if not w.startswith("-")}
    stale = [
        framework
        for framework, builds in _BUILDS_OF.items()
        if framework in environment.imported and touched & set(builds)
    ]
    if not stale:
        return None
    return f"{' and '.join(stale)} was imported before and its build has changed"


_BUILDS_OF = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly", "libtpu"),
    "jax": ("jax", "jaxlib", "libtpu"),
    "keras": ("keras",),
}


def install(engine: str = "auto", *, dry_run: bool = False) -> tuple[Command, ...]:
    """Prints the commands that this runtime needs, then runs them.

    Args:
        engine: `"tensorflow"`, `"jax"` or `"auto"`.
        dry_run: print only.

    Returns:
        The commands.

    Raises:
        ColabTPUError: a command failed.
    """
    environment = surroundings.detect()
    chosen, reason = choose_engine(environment, engine)
    commands = plan(environment, chosen)
    print(f"{environment.platform}, {environment.device}; engine {chosen} ({reason})")
    if not commands:
        print("Nothing to install: everything is here.")
        return commands
    for number, command in enumerate(commands, 1):
        print(f"{number}. {command}\n   {command.why}", flush=True)
        if not dry_run:
            _call(command)
    stale = restart_reason(environment, commands)
    if dry_run:
        print("Dry run: nothing was changed.")
    elif stale:
        print(f"Restart the kernel now (Colab: Runtime > Restart session): {stale}.")
    else:
        print("Done. A notebook that imported TensorFlow, JAX or Keras before must be restarted.")
    return commands


def _tensorflow(e: Environment) -> list[Command | None]:
    """One TensorFlow, the one for this device, with the libraries that it needs."""
    if e.chip and e.chip.name == "tpu7x":
        raise ColabTPUError(
            f"TensorFlow does not support {e.device}.", f"{catalogue.INSTALL} --engine jax"
        )
    present = [name for name in _TENSORFLOWS if name in e.builds]
    needed = {"tpu": "tensorflow-tpu", "gpu": "tensorflow"}.get(e.accelerator)
    keep = needed or (present[0] if present else "tensorflow")
    wrong = [name for name in present if name != keep]
    removal = _remove(wrong, f"on this device it must be {keep}, which owns the same directory")
    if keep not in e.builds:
        return [removal, _fresh_tensorflow(e)]
    again = None
    if wrong:
        options = ["--force-reinstall", "--no-deps"]
        why = f"the removal took files of {keep} with it"
        again = _add(f"{keep}=={e.builds[keep]}", why, options=options)
    return [removal, again, _libraries_of_tensorflow(e, keep)]


def _fresh_tensorflow(e: Environment) -> Command:
    if e.accelerator == "tpu":
        # libtpu stands in the same command, so that pip keeps the one that is there.
        return _add(_TENSORFLOW_TPU, "the TPU build, with a libtpu that it can load", LIBTPU)
    extra = "[and-cuda]" if e.accelerator == "gpu" and not e.cuda_libraries else ""
    return _add(f"tensorflow{extra}{_TENSORFLOW}", "the TensorFlow engine is missing")


def _libraries_of_tensorflow(e: Environment, keep: str) -> Command | None:
    if keep == "tensorflow-tpu":
        return _libtpu_for_tensorflow(e)
    if e.accelerator == "gpu" and not e.cuda_libraries:
        return _add(f"tensorflow[and-cuda]=={e.builds[keep]}", "CUDA's libraries are missing")
    return None


def _libtpu_for_tensorflow(e: Environment) -> Command | None:
    if checks.libtpu_fits(e):
        return None
    oldest, newest = checks.LIBTPU_FOR_TENSORFLOW.get(
        checks.version(e.builds["tensorflow-tpu"])[:2], ((), ())
    )
    if oldest == newest:
        raise ColabTPUError(
            f"tensorflow-tpu {e.builds['tensorflow-tpu']} with libtpu "
            f"{e.builds.get('libtpu', '(absent)')} is not a pair that is known to work.",
            f"pip uninstall -y tensorflow-tpu, then {catalogue.INSTALL} --engine tensorflow",
        )
    return _add(LIBTPU, "with this libtpu `import tensorflow` aborts")


def _jax(e: Environment) -> list[Command | None]:
    extra = {"tpu": "[tpu]", "gpu": "[cuda12]", "cpu": ""}[e.accelerator]
    whole = all(name in e.builds for name in ("jax", "jaxlib"))
    driver = {
        "tpu": "libtpu" in e.builds,
        "gpu": any(f"jax-cuda{n}-plugin" in e.builds for n in (12, 13)),
        "cpu": True,
    }[e.accelerator]
    if whole and driver:
        return []
    wanted = f"=={e.builds['jax']}" if whole else _JAX
    return [
        _add(
            f"jax{extra}{wanted}",
            "the JAX engine is missing" if not whole else "JAX lacks its driver",
        )
    ]


def _keras(e: Environment, engine: str) -> list[Command | None]:
    """Keras, keras-hub and what it needs; --no-deps, since keras-hub asks for stock TensorFlow."""
    commands: list[Command | None] = []
    hub = e.builds.get("keras-hub")
    if engine == "jax" and checks.keras_hub_without_tensorflow(e, engine):
        hub = None  # too old to be imported without TensorFlow
    # A keras-hub that is there came with the image and its Keras; 0.32 needs Keras 3.15.
    oldest = ">=3.15" if hub is None or checks.version(hub) >= (0, 32) else ">=3.13.2"
    if not _meets(e, "keras", f"{oldest},<3.16"):
        light = ["--no-deps"] if "keras" in e.builds else []
        commands.append(_add(_KERAS[1], "keras-hub 0.32 needs Keras 3.15", options=light))
    if hub is None:
        commands.append(_add(_KERAS_HUB, "presets and layers", options=["--no-deps"]))
    if engine == "tensorflow" and "tensorflow-text" not in e.builds:
        commands.append(_tensorflow_text(e))
    needs = _KERAS_HUB_NEEDS if hub is None or checks.version(hub) >= (0, 32) else {}
    return [*commands, _missing(e, needs, "what keras-hub imports")]


def _tensorflow_text(e: Environment) -> Command | None:
    """The tensorflow-text whose compiled ops fit the TensorFlow that this plan ends with."""
    present = [e.builds[name] for name in _TENSORFLOWS if name in e.builds]
    if sys.platform == "win32":
        return None
    package = _TENSORFLOW_TEXT
    if e.accelerator != "tpu" and present:
        package = f"tensorflow-text=={'.'.join(present[0].split('.')[:2])}.*"
    why = "keras-hub's tokenizers; without --no-deps it would pull stock TensorFlow"
    return _add(package, why, options=["--no-deps"])


def _common(e: Environment) -> list[Command | None]:
    linux_only = {} if platform.system() == "Linux" else {"array-record"}
    wanted = {n: v for n, v in _ANY_ENGINE.items() if n not in linux_only}
    return [_missing(e, wanted, "what the notebooks use on either engine")]


def _missing(e: Environment, wanted: dict[str, tuple[str, str]], why: str) -> Command | None:
    packages = [p for name, (tried, p) in wanted.items() if not _meets(e, name, tried)]
    return _add(packages[0], why, *packages[1:]) if packages else None


def _add(package: str, why: str, *more: str, options: list[str] | None = None) -> Command:
    return Command(("install", *(options or ()), package, *more), why)


def _remove(names: list[str], why: str) -> Command | None:
    return Command(("uninstall", "-y", *names), why) if names else None


def _meets(e: Environment, name: str, tried: str) -> bool:
    """Whether a build is installed in the range `">=low,<high"`; the range's end may be open."""
    if name not in e.builds:
        return False
    have = checks.version(e.builds[name])
    low, _, high = tried.removeprefix(">=").partition(",<")
    return checks.version(low) <= have and (not high or have < checks.version(high))


def _name(word: str) -> str:
    name = word
    for mark in "[=<>!~":
        name = name.partition(mark)[0]
    return name.replace("_", "-")


def _call(command: Command) -> None:
    status = subprocess.run(_words(command), check=False).returncode
    if status:
        raise ColabTPUError(
            f"`{command}` ended with status {status}.",
            "Read pip's last lines above; on Kaggle switch Internet on in the notebook's settings.",
        )


def _words(command: Command) -> list[str]:
    """The command for pip, or for uv where an environment made by uv has no pip."""
    verb, *rest = command.words
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", verb, *rest]
    uv = shutil.which("uv")
    if uv is None:
        raise ColabTPUError(
            f"Neither pip nor uv is installed for {sys.executable}.",
            f"{sys.executable} -m ensurepip",
        )
    # uv asks nothing, so it knows no -y.
    return [uv, "pip", verb, "--python", sys.executable, *(w for w in rest if w != "-y")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("--engine", choices=("auto", *ENGINES), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--json", action="store_true", help="print the plan as plain data only")


def run(args: argparse.Namespace) -> int:
    """Prints and runs the plan; exit status 0 when the runtime is ready for the engine after it."""
    if args.json:
        commands = plan(surroundings.detect(), args.engine)
        print(json.dumps([dataclasses.asdict(c) | {"command": str(c)} for c in commands], indent=2))
        return 0
    install(args.engine, dry_run=args.dry_run)
    if args.dry_run:
        return 0
    diagnosis = diagnose(surroundings.detect(), args.engine)
    if not diagnosis.ready:
        print(f"\n{diagnosis}")
    return 0 if diagnosis.ready else 1
