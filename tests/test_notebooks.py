"""What must hold of every committed notebook before it runs anywhere."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def sources(path: Path, kind: str) -> list[str]:
    return ["".join(c["source"]) for c in read(path)["cells"] if c["cell_type"] == kind]


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


@every_notebook
def test_the_badge_opens_this_very_notebook(path: Path) -> None:
    first = sources(path, "markdown")[0]
    owner_and_name = ADDRESS.removeprefix("https://github.com/")
    link = f"https://colab.research.google.com/github/{owner_and_name}/blob/main/notebooks/"
    assert f"({link}{path.name})" in first


@every_notebook
def test_the_first_cell_says_what_you_get_on_which_hardware_in_how_many_minutes(path: Path) -> None:
    first = sources(path, "markdown")[0]
    for promise in ("What you will have at the end", "Hardware", "Time"):
        assert f"**{promise}:**" in first
    assert re.search(r"\d+ minutes?", first)


@every_notebook
def test_colab_is_asked_for_a_v5e(path: Path) -> None:
    metadata = read(path)["metadata"]
    assert metadata["accelerator"] == "TPU"
    assert metadata["colab"]["gpuType"] == "V5E1"


@every_notebook
def test_no_outputs_are_committed_except_of_checked_cells(path: Path) -> None:
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "code" and "NBVAL_CHECK_OUTPUT" not in "".join(cell["source"]):
            assert not cell["outputs"]
            assert cell["execution_count"] is None


@every_notebook
def test_the_first_code_cell_installs_and_the_second_connects(path: Path) -> None:
    install, connect = sources(path, "code")[:2]
    assert f'SOURCE = "git+{ADDRESS}"' in install
    assert "-m colabtpu install --engine {ENGINE}" in install
    assert "ct.connect(engine=ENGINE)" in connect


@every_notebook
def test_no_cell_is_longer_than_25_lines(path: Path) -> None:
    assert max(s.count("\n") + 1 for s in sources(path, "code")) <= 25


@every_notebook
def test_a_form_choice_has_a_default_among_its_options(path: Path) -> None:
    forms = re.findall(
        r'^\w+ = ("[^"]*")  # @param (\[.*?\])(.*)$', "\n".join(sources(path, "code")), re.M
    )
    assert forms
    for default, options, _ in forms:
        assert json.loads(default) in json.loads(options)


def test_every_address_derives_from_pyproject() -> None:
    check = [sys.executable, str(ROOT / "tools" / "stamp.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
