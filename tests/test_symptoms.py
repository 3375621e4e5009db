"""Error texts: each that people really met is explained, and no other is touched."""

import json
import re
from pathlib import Path

import pytest

from colabtpu import doctor
from colabtpu.errors import ColabTPUError
from colabtpu.symptoms import SYMPTOMS, explain, watch

MET = json.loads((Path(__file__).parent / "data/error_texts.json").read_text())

# Errors of every day, as Python, numpy, Keras, JAX, TensorFlow, PyTorch and pip print them.
UNKNOWN = [
    "ZeroDivisionError: division by zero",
    "KeyError: 'HOME'",
    "IndexError: index 0 is out of bounds for axis 0 with size 0",
    "ModuleNotFoundError: No module named 'tensorflow_addons'",
    "ValueError: Exception encountered when calling Dense.call().\n\nDimensions must be equal, but "
    "are 4 and 5 for '{{node sequential_1/dense_1/MatMul}}'",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 14.74 GiB of which 1.06 GiB is free.",
    "URLError: <urlopen error [Errno -2] Name or service not known>",
    "ValueError: Unknown optimizer: 'adamw2'. Please ensure you are using a `keras.utils."
    "custom_object_scope` and that this object is included in the scope.",
    "jax.errors.TracerArrayConversionError: The numpy.ndarray conversion method __array__() was "
    "called on traced array with shape float32[3]",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "OSError: [Errno 28] No space left on device: 'model.keras'",
    "ValueError: The `.weights.h5` file could not be read: layer 'dense' expected 2 variables",
    "ERROR: Could not find a version that satisfies the requirement colabtpu (from versions: none)",
    "ResourceExhaustedError: OOM when allocating tensor of shape [4096] and type float",
]


@pytest.mark.parametrize("met", MET, ids=lambda met: met["code"])
def test_a_text_that_people_met_is_explained(met):
    found = explain(met["text"])
    assert found is not None, met["origin"]
    assert found.code == met["code"]
    assert found.fix in str(found)


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_text_that_is_not_ours_passes_through(text):
    assert explain(text) is None


def test_the_catalogue_has_at_least_forty_entries_and_a_real_text_for_each():
    assert len(SYMPTOMS) >= 40
    assert {symptom.code for symptom in SYMPTOMS} == {met["code"] for met in MET}
    assert len({symptom.code for symptom in SYMPTOMS}) == len(SYMPTOMS)


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.code)
def test_an_entry_says_what_it_means_and_what_to_do(symptom):
    assert len(symptom.cause) > 20
    assert len(symptom.fix) > 5
    assert symptom.source
    # What the page shows must be recognisable: its letters come from the pattern's own text.
    words = set(re.findall(r"[A-Za-z]{4,}", symptom.shows))
    assert any(word in met["text"] for met in MET if met["code"] == symptom.code for word in words)


def connect(*, aside: bool) -> None:
    try:
        {}["COLAB_TPU_ADDR"]
    except KeyError as inner:
        raise RuntimeError("could not connect") from (None if aside else inner)


def test_an_exception_is_explained_by_its_cause():
    with pytest.raises(RuntimeError) as caught:
        connect(aside=False)
    assert explain(caught.value).code == "colab-tpu-addr"


def test_a_context_that_was_set_aside_explains_nothing():
    with pytest.raises(RuntimeError) as caught:
        connect(aside=True)
    assert explain(caught.value) is None


def test_a_general_text_counts_only_where_the_right_file_raised_it():
    code = compile("raise IndexError('index 0 is out of bounds for axis 0 with size 0')",
                   "/x/tensorflow/python/distribute/tpu_strategy.py", "exec")  # fmt: skip
    with pytest.raises(IndexError) as caught:
        exec(code)
    assert explain(caught.value).code == "strategy-before-the-tpu-is-initialised"
    assert explain(IndexError("index 0 is out of bounds for axis 0 with size 0")) is None


def test_our_own_errors_carry_their_fix_and_are_left_alone():
    error = ColabTPUError("KeyError: 'COLAB_TPU_ADDR'", "do this")
    assert explain(error) is None


def test_an_exception_that_is_its_own_cause_does_not_hang():
    error = ValueError("round and round")
    other = ValueError("and round")
    error.__cause__, other.__cause__ = other, error
    assert explain(error) is None


def test_without_a_notebook_there_is_nothing_to_watch():
    assert watch() is False


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell()


def plain(text: str) -> str:
    """The text without colours and without the numbers of the cells."""
    return re.sub(r"\x1b\[[\d;]*m|In ?\[\d+\]|input-\d+-\w+", "", text)


def test_in_a_notebook_a_known_error_carries_the_note_under_its_traceback(shell, capsys):
    assert watch(shell)
    assert watch(shell), "a second call changes nothing"
    shell.run_cell("{}['COLAB_TPU_ADDR']")
    # IPython 9 prints notes with the traceback; for 7 they go to the error stream, below it.
    said = plain("".join(capsys.readouterr()))
    assert said.count("colabtpu.connect(); `python -m colabtpu migrate") == 1
    assert said.index("KeyError: 'COLAB_TPU_ADDR'") < said.index("colabtpu: Colab set that")


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("if True:\npass", "IndentationError"),
        ("import json\njson.loads('[')", "JSONDecodeError"),
        ("exec('def f(:')", "SyntaxError"),
        ("%no_such_magic", "no_such_magic"),
    ],
)
def test_in_a_notebook_an_unknown_error_is_shown_as_it_always_was(shell, capsys, cell, error):
    shell.run_cell(cell)
    before = "".join(capsys.readouterr())
    watch(shell)
    shell.run_cell(cell)
    after = "".join(capsys.readouterr())
    assert error in before
    assert plain(after) == plain(before)


def test_a_handler_that_was_there_before_still_runs(shell, capsys):
    def theirs(shell, kind, error, trace, tb_offset=None):
        print("theirs saw", kind.__name__)

    shell.set_custom_exc((KeyError,), theirs)
    watch(shell)
    shell.run_cell("{}['x']")
    assert "theirs saw KeyError" in capsys.readouterr().out
    shell.run_cell("1/0")
    said = capsys.readouterr().out
    assert "theirs" not in said
    assert "ZeroDivisionError" in said


def test_an_ipython_that_shows_no_notes_still_shows_the_explanation(shell, capsys, monkeypatch):
    # Colab's IPython 7.34 leaves an exception's notes out.
    tracebacks = type(shell.InteractiveTB)
    real = tracebacks.structured_traceback

    def without_notes(self, kind, error, trace=None, *more, **options):
        notes, error.__notes__ = getattr(error, "__notes__", []), []
        try:
            return real(self, kind, error, trace, *more, **options)
        finally:
            error.__notes__ = notes

    monkeypatch.setattr(tracebacks, "structured_traceback", without_notes)
    watch(shell)
    shell.run_cell("{}['COLAB_TPU_ADDR']")
    said = capsys.readouterr()
    assert "colabtpu: Colab set that" not in said.out
    assert said.err.count("colabtpu: Colab set that") == 1


def test_in_a_real_kernel_the_note_is_part_of_the_cells_output():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = ["from colabtpu import doctor\ndoctor.watch()", "{}['COLAB_TPU_ADDR']", "1/0"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, allow_errors=True, kernel_name="python3", startup_timeout=300
    ).execute()
    first, known, unknown = (json.dumps(cell.outputs) for cell in notebook.cells)
    assert "True" in first
    assert "python -m colabtpu migrate" in known
    assert "ZeroDivisionError" in unknown
    assert "colabtpu:" not in unknown


def test_the_doctor_offers_both():
    assert doctor.explain is explain
    assert doctor.watch is watch
