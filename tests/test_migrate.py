"""Migration of notebooks of other years: each case line by line, and nothing lost on the way."""

import ast
import json
from pathlib import Path

import pytest

from colabtpu import cli
from colabtpu.errors import ColabTPUError
from colabtpu.migrate import migrate, write

CASES = Path(__file__).parent / "data/old_notebooks"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def case(tmp_path):
    """Copies one of the old notebooks into a folder of its own, under its real name."""

    def copy(name: str) -> Path:
        file = tmp_path / name
        file.write_bytes((CASES / f"{name}.txt").read_bytes())
        return file

    return copy


@pytest.fixture
def script(tmp_path):
    """Migrates a few lines of Python."""

    def read(text: str):
        file = tmp_path / "script.py"
        file.write_text(text)
        return migrate(file)

    return read


# Line by line, written down by reading the files: (cell, first line, code), * where a person
# must do it.
FOUND = {
    "2018_contrib.py": [
        (None, 2, "connect-first"),
        (None, 4, "tpu-setup"),
        (None, 6, "model-outside-scope"),
        (None, 7, "input-length"),
        (None, 11, "tf1-optimizer"),
        (None, 13, "tpu-setup"),
        (None, 21, "sync-to-cpu"),
    ],
    "2019_colab_addr.py": [
        (None, 3, "connect-first"),
        (None, 5, "tpu-setup"),
        (None, 11, "tpu-setup"),
        (None, 12, "tpu-setup"),
        (None, 13, "tpu-setup"),
        (None, 14, "tpu-setup"),
        (None, 22, "optimizer-lr"),
        (None, 28, "weights-file-name"),
    ],
    "2020_kaggle_detect.py": [
        (None, 1, "connect-first"),
        (None, 2, "kaggle-bucket"),
        (None, 4, "tpu-setup"),
        (None, 10, "tpu-setup"),
        (None, 17, "autotune"),
        (None, 19, "kaggle-bucket"),
        (None, 37, "compile-order"),
    ],
    "2021_experimental_strategy.py": [
        (None, 2, "connect-first"),
        (None, 4, "tpu-setup"),
        (None, 5, "tpu-setup"),
        (None, 6, "tpu-setup"),
        (None, 7, "tpu-setup"),
        (None, 9, "mixed-precision"),
        (None, 10, "mixed-precision"),
        (None, 17, "optimizer-decay"),
        (None, 17, "steps-per-execution"),
        (None, 23, "eight-cores*"),
        (None, 24, "save-format"),
    ],
    "2023_hf_tf.py": [
        (None, 1, "connect-first"),
        (None, 3, "transformers-tensorflow*"),
        (None, 5, "tpu-setup"),
        (None, 20, "transformers-tensorflow*"),
    ],
    "2025_plain_install.ipynb": [
        (0, 1, "old-runtime"),
        (1, 2, "old-runtime*"),
        (2, 1, "notebook-line"),
        (3, 1, "connect-first"),
        (3, 3, "tpu-device-list"),
        (4, 1, "tpu-setup"),
        (4, 2, "tpu-setup"),
        (4, 3, "tpu-setup"),
        (4, 4, "tpu-setup"),
        (5, 1, "keras-nlp"),
        (5, 3, "keras-nlp"),
        (5, 4, "clipping-by-replica*"),
        (5, 4, "jit-compile"),
        (5, 4, "steps-per-execution"),
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_every_dead_line_of_an_old_notebook_is_found(case, name):
    found = migrate(case(name)).findings
    assert [(f.cell, f.line, f.code + "*" * f.by_hand) for f in found] == FOUND[name]
    for finding in found:
        assert finding.what.endswith(".")
        assert finding.instead


def test_the_notebook_of_2018_becomes_what_one_would_write_today(case):
    # Written by hand.
    wanted = (CASES / "2018_contrib.migrated.py.txt").read_text()
    assert migrate(case("2018_contrib.py")).text == wanted


@pytest.mark.parametrize(
    ("name", "written", "dead"),
    [
        ("2019_colab_addr.py",
         ["\nstrategy = connection.strategy\n", "Adam(learning_rate=0.01)", '"./out.weights.h5"'],
         ["COLAB_TPU_ADDR", "worker", "resolver", "lr="]),
        ("2020_kaggle_detect.py",
         ["\nstrategy = connection.strategy\n", 'glob("/kaggle/input/flowers" + "/train*.tfrec")',
          "tf.data.AUTOTUNE", 'metrics=["sparse_categorical_accuracy"])'],
         ["try:", "TPUClusterResolver", "KaggleDatasets", "get_strategy", "if tpu"]),
        ("2021_experimental_strategy.py",
         ["tf.keras.mixed_precision.set_global_policy(policy)",
          "schedules.InverseTimeDecay(1e-3, decay_steps=1, decay_rate=1e-6))",
          'metrics=["accuracy"])\n', 'model.save("model.h5")', "batch_size=128 * 8"],
         ["experimental", "grpc", "decay=1e-6", "save_format"]),
        ("2023_hf_tf.py",
         ["\nstrategy = connection.strategy\n", "TFAutoModelForSequenceClassification"],
         ["TPUClusterResolver", "MirroredStrategy"]),
    ],
)  # fmt: skip
def test_what_is_safe_is_written_and_the_rest_is_left(case, name, written, dead):
    text = migrate(case(name)).text
    for part in written:
        assert part in text
    for part in dead:
        assert part not in text
    # The variables that open a TPU are set before TensorFlow is imported.
    assert text.index("colabtpu.connect(") < text.index("import tensorflow")


def test_a_notebook_keeps_its_cells_and_asks_for_todays_runtime(case):
    file = case("2025_plain_install.ipynb")
    old = json.loads(file.read_text())
    new = json.loads(migrate(file).text)
    assert [c["cell_type"] for c in new["cells"]] == [c["cell_type"] for c in old["cells"]]
    assert new["metadata"]["colab"]["gpuType"] == "V5E1"
    code = ["".join(c["source"]) for c in new["cells"]]
    assert code[0] == "".join(old["cells"][0]["source"])
    assert code[1].splitlines()[1] == "!python -m colabtpu install --engine tensorflow"
    assert code[2].startswith("import colabtpu\n\nconnection = colabtpu.connect(")
    assert 'devices = [d for d in connection.devices if connection.device == "tpu"]' in code[2]
    assert code[3] == (
        'strategy = connection.strategy\nprint("replicas", strategy.num_replicas_in_sync)'
    )
    assert "keras_nlp" not in code[4]
    assert "steps_per_execution" not in code[4]
    assert "jit_compile" not in code[4]
    assert code[5] == "".join(old["cells"][5]["source"])


@pytest.mark.parametrize("name", FOUND)
def test_write_keeps_a_copy_and_a_second_run_changes_nothing(case, name, capsys):
    file = case(name)
    before = file.read_bytes()
    by_hand = [code for *_, code in FOUND[name] if code == "transformers-tensorflow*"]
    assert cli.main(["migrate", str(file), "--write"]) == (1 if by_hand else 0)
    copy = file.with_suffix(f".old{file.suffix}")
    assert copy.read_bytes() == before
    assert file.read_bytes() != before
    again = migrate(file)
    assert not again.changed
    assert all(finding.by_hand for finding in again.findings)
    cli.main(["migrate", str(file), "--write"])
    assert len(list(file.parent.iterdir())) == 2, "no second copy"


def test_without_write_nothing_is_changed(case, capsys):
    file = case("2018_contrib.py")
    before = file.read_bytes()
    assert cli.main(["migrate", str(file)]) == 0
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    said = capsys.readouterr().out
    assert "line 4  dead  [tpu-setup]" in said
    assert "--write makes the changes" in said


def test_a_copy_that_is_there_is_never_overwritten(case):
    file = case("2018_contrib.py")
    file.with_suffix(".old.py").write_text("precious")
    copy = write(migrate(file))
    assert copy.name == "2018_contrib.old2.py"
    assert file.with_suffix(".old.py").read_text() == "precious"


def test_json_lists_the_findings(case, capsys):
    assert cli.main(["migrate", str(case("2023_hf_tf.py")), "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert [(f["line"], f["by_hand"]) for f in plain["findings"]] == [
        (1, False),
        (3, True),
        (5, False),
        (20, True),
    ]


# Care: what is not certain is said and left alone.


def test_a_resolver_that_is_used_elsewhere_stops_the_change_of_the_setup(script):
    text = (
        "import tensorflow as tf\n"
        "tpu = tf.distribute.cluster_resolver.TPUClusterResolver()\n"
        "strategy = tf.distribute.TPUStrategy(tpu)\n"
        "workers = tpu.cluster_spec().as_dict()['worker']\n"
        "train(workers)\n"
    )
    found = script(text)
    assert found.text == text
    assert [(f.line, f.by_hand) for f in found.left] == [(2, True), (3, True), (4, True)]


def test_setup_amid_other_work_is_said_and_left_alone(script):
    text = (
        "import tensorflow as tf\n"
        "try:\n"
        "    tpu = tf.distribute.cluster_resolver.TPUClusterResolver()\n"
        "    data = load()\n"
        "except ValueError:\n"
        "    data = None\n"
        "with tf.distribute.TPUStrategy(tpu).scope():\n"
        "    fit(data)\n"
    )
    found = script(text)
    assert found.text == text
    assert {f.line for f in found.left} == {3, 7}


def test_a_statement_that_shares_its_line_is_left_alone(script):
    text = "import tensorflow as tf\nstrategy = tf.distribute.TPUStrategy(r); important()\n"
    found = script(text)
    assert "important()" in found.text
    assert found.left


def test_a_model_with_a_long_string_is_not_indented(script):
    text = (
        "import tensorflow as tf\n"
        "net = build('''first\nsecond''')\n"
        "tpu_net = tf.contrib.tpu.keras_to_tpu_model(net)\n"
    )
    found = script(text)
    assert "'''first\nsecond'''" in found.text
    assert next(f for f in found.findings if f.code == "model-outside-scope").by_hand


def test_detection_inside_a_function_is_replaced_there(script):
    found = script(
        "import tensorflow as tf\n\n"
        "def connect():\n"
        "    try:\n"
        "        tpu = tf.distribute.cluster_resolver.TPUClusterResolver()\n"
        "        tf.config.experimental_connect_to_cluster(tpu)\n"
        "        tf.tpu.experimental.initialize_tpu_system(tpu)\n"
        "        strategy = tf.distribute.experimental.TPUStrategy(tpu)\n"
        "    except ValueError:\n"
        "        strategy = tf.distribute.get_strategy()\n"
        "    return strategy\n"
    )
    assert found.text == (
        'import colabtpu\n\nconnection = colabtpu.connect(engine="tensorflow")\n\n'
        "import tensorflow as tf\n\n"
        "def connect():\n"
        "    strategy = connection.strategy\n"
        "    return strategy\n"
    )


def test_a_name_that_is_taken_is_not_taken_again(script):
    found = script(
        "import tensorflow as tf\nconnection = open_database()\n"
        "strategy = tf.distribute.TPUStrategy(None)\n"
    )
    assert "strategy = tpu_connection.strategy" in found.text
    assert "connection = open_database()" in found.text


def test_columns_are_counted_in_characters_where_letters_are_not_ascii(script):
    found = script('é, a = "ü", tf.keras.optimizers.Adam(lr=0.1)\n')
    assert found.text == 'é, a = "ü", tf.keras.optimizers.Adam(learning_rate=0.1)\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("m.fit_generator(g, epochs=2)", "m.fit(g, epochs=2)"),
        ("m.fit_generator(g, epochs=2, workers=4)", "m.fit(g, epochs=2)"),
        ("i = ds.make_one_shot_iterator()", "i = iter(ds)"),
        ("strategy.experimental_run_v2(f)", "strategy.run(f)"),
        ("model.save('out')", 'model.save("out.keras")'),
        ("tf.train.MomentumOptimizer(0.1, 0.9)", "tf.keras.optimizers.SGD(0.1, 0.9)"),
        ("m.compile('adam', jit_compile=True)", "m.compile('adam')"),
        ("m.compile(steps_per_execution=8, loss='mse')", "m.compile(loss='mse')"),
    ],
)
def test_a_name_of_other_years_is_replaced(script, old, new):
    found = script(f"{old}\n")
    assert found.text == f"{new}\n"
    assert not found.left


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("tf.train.AdamOptimizer(0.1, beta1=0.8)", "optimizers.Adam"),
        ("m.fit_generator(g, 100, 5)", "fit(...)"),
        ("with tf.Session() as s: s.run(x)", "no sessions"),
        ("x = tf.placeholder(tf.float32)", "keras.Input"),
        ("tf.contrib.layers.fully_connected(x, 3)", "Keras"),
        ("tf.compat.v1.estimator.tpu.TPUEstimator(f)", "fit()"),
        ("m.compile('adam', 'mse', ['acc'], [1.0])", "metrics="),
    ],
)
def test_what_cannot_be_changed_safely_is_said(script, old, said):
    found = script(f"{old}\n")
    assert found.text == f"{old}\n"
    assert said in str(found)
    assert found.left


def test_an_optimizer_is_known_by_where_it_was_imported_from(tmp_path):
    file = notebook(
        tmp_path,
        "from tensorflow.keras.optimizers import Adam\nfrom torch.optim import SGD",
        "a = Adam(lr=1.0)\nb = SGD(p, lr=1.0)\nc = torch.optim.Adam(p, lr=1.0)\n"
        "d = Adam(1e-3, decay=1e-6)",
    )
    found = migrate(file)
    changed = "".join(json.loads(found.text)["cells"][1]["source"])
    assert changed.splitlines()[:3] == [
        "a = Adam(learning_rate=1.0)",
        "b = SGD(p, lr=1.0)",
        "c = torch.optim.Adam(p, lr=1.0)",
    ]
    # What to write needs a name that this notebook may not have.
    assert [(f.line, f.code) for f in found.left] == [(4, "optimizer-decay")]


def test_code_of_today_has_nothing_dead(script):
    found = script(
        "import re\n"
        "import colabtpu as ct\n"
        "tpu = ct.connect()\n"
        "import keras\n"
        "with tpu.scope():\n"
        "    model = keras.Sequential([keras.layers.Dense(1)])\n"
        "    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3), loss='mse')\n"
        "model.fit(dataset.batch(8, drop_remainder=True), steps_per_epoch=10)\n"
        "model.save('model.keras')\n"
        "pattern = re.compile('a', re.M)\n"
        "code = compile('1', 'f', 'eval')\n"
    )
    assert found.findings == ()
    assert not found.changed


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=str)
def test_our_own_notebooks_have_nothing_dead(notebook):
    assert [f for f in migrate(notebook).findings if f.dead] == []


# Notebook lines


def notebook(tmp_path: Path, *cells: str) -> Path:
    file = tmp_path / "n.ipynb"
    code = [
        {"cell_type": "code", "metadata": {}, "execution_count": 3, "outputs": [{"a": 1}],
         "source": cell.splitlines(keepends=True)}
        for cell in cells
    ]  # fmt: skip
    file.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code}))
    return file


def test_lines_of_the_notebook_are_read_and_kept(tmp_path):
    file = notebook(
        tmp_path,
        "%tensorflow_version 2.x\nimport tensorflow as tf\n!ls",
        "if need:\n    !pip install -q keras-nlp\nx = 7 \\\n% 3\nopt = tf.optimizers.Adam(lr=x)",
        "%%bash\nthis is not python",
        "!tensorboard --logdir logs",
        'text = """\n!pip install tensorflow\n"""',
        "def broken(:",
    )
    found = migrate(file)
    cells = ["".join(c["source"]) for c in json.loads(found.text)["cells"]]
    assert cells[0] == "import tensorflow as tf\n!ls"
    assert cells[1] == (
        "if need:\n"
        "    !pip install -q git+https://github.com/colabtpu/colabtpu\n"
        "    !python -m colabtpu install --engine tensorflow\n"
        "x = 7 \\\n% 3\nopt = tf.optimizers.Adam(learning_rate=x)"
    )
    assert cells[2] == "%%bash\nthis is not python"
    assert cells[3] == "%tensorboard --logdir logs\n"
    assert "!pip install tensorflow" in cells[4]
    assert [(f.cell, f.code) for f in found.left] == [(6, "does-not-parse")]


def test_a_changed_cell_loses_its_outputs_and_an_unchanged_one_keeps_them(tmp_path):
    file = notebook(tmp_path, "a = keras.optimizers.Adam(lr=1.0)", "a = 1")
    changed, kept = json.loads(migrate(file).text)["cells"]
    assert (changed["outputs"], changed["execution_count"]) == ([], None)
    assert (kept["outputs"], kept["execution_count"]) == ([{"a": 1}], 3)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "x", ".py or .ipynb"),
        ("a.py", "print 'two'", "does not parse"),
        ("a.ipynb", "{", "not a notebook"),
        ("a.ipynb", '{"worksheets": []}', "not a notebook"),
        ("missing.py", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_migrated_gets_one_clear_error(tmp_path, name, content, said):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ColabTPUError, match=said):
        migrate(file)


@pytest.mark.parametrize("name", [name for name in FOUND if name.endswith(".py")])
def test_what_is_written_parses(case, name):
    ast.parse(migrate(case(name)).text)
