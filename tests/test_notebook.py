"""The headless runner and the form override, on notebooks built here."""

import json
from pathlib import Path

import nbformat
import pytest

from colabtpu import notebook
from colabtpu.errors import ColabTPUError, InvalidArgumentError

# A line as Keras 3.15 prints it in a notebook, colour codes and all.
KERAS_BAR = (
    "\x1b[1m 12/240\x1b[0m \x1b[37m━━━━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m7:32\x1b[0m 2s/step"
    " - accuracy: 0.0312 - loss: 8.1534"
)


def test_a_form_field_keeps_its_type_when_the_environment_overrides_it() -> None:
    form = {"EPOCHS": 3, "RATE": 0.1, "CORPUS": "python", "FAST": False, "lower": 1}
    env = {"CT_EPOCHS": "1", "CT_RATE": "1e-3", "CT_CORPUS": "lm1b", "CT_FAST": "true"}
    changed = notebook.from_environment(form, {**env, "CT_lower": "5", "CT_OTHER": "x"})
    assert changed == {"EPOCHS": 1, "RATE": 1e-3, "CORPUS": "lm1b", "FAST": True}
    assert isinstance(changed["EPOCHS"], int)


@pytest.mark.parametrize(("field", "text"), [(3, "many"), (3, "1.5"), (True, "maybe")])
def test_a_value_of_another_type_is_refused_with_its_name(field: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"CT_X='{text}'"):
        notebook.from_environment({"X": field}, {"CT_X": text})


def test_progress_reads_keras_bar() -> None:
    progress = notebook.Progress(cells=9, cell=7, title="Train")
    progress.read(KERAS_BAR)
    assert (progress.step, progress.steps, progress.loss) == (12, 240, 8.1534)
    assert progress.line().startswith("cell 7/9  Train  step 12/240  loss 8.153")


def write(path: Path, *sources: str) -> Path:
    """A notebook with a heading over each of these code cells."""
    cells = []
    for number, source in enumerate(sources, 1):
        cells.append(nbformat.v4.new_markdown_cell(f"# Part {number}"))
        cells.append(nbformat.v4.new_code_cell(source))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_a_run_leaves_the_executed_notebook_its_html_and_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "small.ipynb",
        "import os, pathlib\nout = pathlib.Path(os.environ['CT_RUN_DIR'])",
        "(out / 'summary.json').write_text('{\"loss\": 1.25}')\nprint('wrote', 6 * 7)",
    )
    args = notebook.argparse.Namespace(notebook=path, runs=tmp_path / "runs")
    assert notebook.run(args) == 0
    (out,) = (tmp_path / "runs").iterdir()
    executed = nbformat.read(out / "notebook.ipynb", as_version=4)
    assert executed.cells[3].outputs[0]["text"] == "wrote 42\n"
    assert "wrote 42" in (out / "notebook.html").read_text()
    assert json.loads((out / "summary.json").read_text()) == {"loss": 1.25}
    printed = capsys.readouterr().out
    assert "cell 2/2  Part 2" in printed
    assert "1.25" in printed


def test_a_failing_cell_is_named_and_the_notebook_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.ipynb", "x = 1", "1 / 0")
    with pytest.raises(ColabTPUError, match=r"Cell 2 of bad.ipynb \(Part 2\).*division by zero"):
        notebook.execute(path, tmp_path, {}, lambda _: None)
    executed = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    assert executed.cells[3].outputs[0]["ename"] == "ZeroDivisionError"


def test_a_missing_notebook_is_one_clear_error(tmp_path: Path) -> None:
    args = notebook.argparse.Namespace(notebook=tmp_path / "no.ipynb", runs=tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"no\.ipynb"):
        notebook.run(args)
