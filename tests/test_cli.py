"""The command line: verbs are found, errors with a fix print without a traceback."""

import argparse
import sys
from types import ModuleType

import pytest

from colabtpu import cli
from colabtpu.errors import ColabTPUError


@pytest.fixture
def verb(monkeypatch):
    """Hangs a verb called "try" on the command line; returns the module that holds it."""
    module = ModuleType("colabtpu_test_verb")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)
    module.run = lambda args: args.size
    monkeypatch.setitem(sys.modules, "colabtpu_test_verb", module)
    monkeypatch.setitem(cli.VERBS, "try", ("colabtpu_test_verb", "try something"))
    return module


def test_a_verb_gets_its_own_arguments_and_its_status_is_returned(verb):
    assert cli.main(["try", "--size", "5"]) == 5


def test_an_error_with_a_fix_prints_without_a_traceback(verb, capsys):
    def run(args: argparse.Namespace) -> int:
        raise ColabTPUError("The disk is full: 0 bytes left", "delete runs/")

    verb.run = run
    assert cli.main(["try"]) == 2
    said = capsys.readouterr().err
    assert said == "error: The disk is full: 0 bytes left\n  Next step: delete runs/\n"


def test_another_error_keeps_its_traceback(verb):
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("a bug")

    verb.run = run
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["try"])


def test_another_error_that_the_doctor_knows_carries_its_explanation(verb):
    def run(args: argparse.Namespace) -> int:
        raise KeyError("COLAB_TPU_ADDR")

    verb.run = run
    with pytest.raises(KeyError) as caught:
        cli.main(["try"])
    assert "colabtpu.connect()" in "".join(caught.value.__notes__)


def test_control_c_ends_quietly(verb, capsys):
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    verb.run = run
    assert cli.main(["try"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["fly"], []])
def test_an_unknown_or_missing_verb_is_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "VERB" in capsys.readouterr().err


def test_help_lists_every_verb_with_what_it_does(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name, (_, summary) in cli.VERBS.items():
        assert name in said
        assert summary in said


def test_an_unknown_option_of_a_verb_is_a_usage_error(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["try", "--speed", "9"])
    assert ended.value.code == 2
    assert "colabtpu try" in capsys.readouterr().err
