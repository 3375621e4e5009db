"""The command line: `python -m colabtpu VERB [options]`.

A verb is a module with two functions, and one line in the table below:

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...          # the exit status

The module is imported only when its verb is called, so `--help` stays fast and no verb
pays for another's imports. A verb that reports something offers `--json`. Errors that this
package raises on purpose are printed without a traceback, and the exit status is 2; another
error whose text the doctor knows carries the explanation under its traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from colabtpu import __version__
from colabtpu.errors import ColabTPUError

# verb -> (the module that holds it, what it does)
VERBS = {
    "data": ("colabtpu.data.prepare", "tokenise a corpus now, to train on it later"),
    "doctor": ("colabtpu.doctor", "say what is wrong with this runtime, and the fix"),
    "install": ("colabtpu.install", "install what this runtime needs, in the right order"),
    "migrate": ("colabtpu.migrate", "bring a notebook of other years to today"),
    "preflight": ("colabtpu.preflight.command", "compile a step for a TPU that is not there"),
    "train": ("colabtpu.notebook", "run a notebook headless and keep what it leaves"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Args:
        argv: the words after `python -m colabtpu`; those of this process if left out.

    Returns:
        The exit status: the verb's own, or 2 after an error with a known fix.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    verb = _parser().parse_args(words[:1]).verb
    home, summary = VERBS[verb]
    module = import_module(home)
    parser = argparse.ArgumentParser(prog=f"python -m colabtpu {verb}", description=summary)
    module.add_arguments(parser)
    args = parser.parse_args(words[1:])
    try:
        return module.run(args)
    except ColabTPUError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        explanation = import_module("colabtpu.symptoms").explain(error)
        if explanation:
            error.add_note(f"\n{explanation}")
        raise
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    parser = argparse.ArgumentParser(
        prog="python -m colabtpu",
        description="Train Keras transformers on TPUs from a notebook.",
        epilog="verbs:\n"
        + "\n".join(f"  {verb:<{width}}  {summary}" for verb, (_, summary) in VERBS.items())
        + "\n\n`python -m colabtpu VERB --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"colabtpu {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="one of the verbs below")
    return parser
