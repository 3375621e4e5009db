"""Runs a migrated script or notebook on the CPU, shortened, with stand-ins for unreachable data.

    python tests/engine/run_migrated.py FILE

What is stood in: the data sets that Keras downloads, a folder of TFRecords under /kaggle/input,
and pretrained weights. What is shortened: fit() to two steps, shuffle buffers, and an LSTM is
not unrolled, which takes minutes to trace. What is not touched: connecting, the strategy, the
model, compile, fit and save of the migrated file itself.
Prints one line, `LOSSES [...]`, with the losses of every fit().
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import colabtpu

connection = colabtpu.connect(engine="tensorflow", devices=2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

FLOWERS = "/kaggle/input/flowers"
losses: list[float] = []
random = np.random.default_rng(0)


def imdb(num_words: int = 4000, **_: object) -> tuple:
    rows = [list(random.integers(1, num_words, random.integers(20, 120))) for _ in range(64)]
    texts, labels = np.array(rows, object), random.integers(0, 2, 64)
    return (texts, labels), (texts, labels)


def mnist(**_: object) -> tuple:
    pictures = random.integers(0, 256, (64, 28, 28), dtype=np.uint8)
    return (pictures, random.integers(0, 10, 64)), (pictures, random.integers(0, 10, 64))


def small_network(include_top: bool, pooling: str, input_shape: tuple) -> keras.Model:
    """In the place of ResNet50, whose weights are downloaded."""
    pictures = keras.Input(input_shape)
    features = keras.layers.Conv2D(4, 7, strides=8)(pictures)
    return keras.Model(pictures, keras.layers.GlobalAveragePooling2D()(features))


def flowers(folder: Path) -> None:
    jpeg = tf.io.encode_jpeg(random.integers(0, 256, (224, 224, 3), dtype=np.uint8)).numpy()
    with tf.io.TFRecordWriter(str(folder / "train0.tfrec")) as writer:
        for label in range(40):
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
                "class": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def stand_in() -> None:
    for module in (keras, tf.keras):
        module.datasets.imdb.load_data = imdb
        module.datasets.mnist.load_data = mnist
        module.applications.ResNet50 = small_network
        lstm = module.layers.LSTM
        module.layers.LSTM = lambda units, unroll, lstm=lstm: lstm(units)
    fit, shuffle = keras.Model.fit, tf.data.Dataset.shuffle

    def short_fit(self, x=None, y=None, **options):
        options |= {"epochs": 1, "verbose": 0}
        if "steps_per_epoch" in options:
            options["steps_per_epoch"] = 2
        history = fit(self, x, y, **options)
        losses.extend(history.history["loss"])
        return history

    keras.Model.fit = short_fit
    tf.data.Dataset.shuffle = lambda self, size, **options: shuffle(self, min(size, 32), **options)


def source(file: Path) -> str:
    if file.suffix == ".py":
        return file.read_text()
    cells = json.loads(file.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # The notebook's own lines (!pip, %tensorboard) are not Python; they are left out here.
    lines = "\n".join(code).splitlines()
    return "\n".join("" if line.lstrip()[:1] in ("!", "%") else line for line in lines)


def main() -> None:
    file = Path(sys.argv[1]).resolve()
    stand_in()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        flowers(Path(folder))
        code = source(file).replace(FLOWERS, folder)
        exec(compile(code, str(file), "exec"), {"__name__": "__main__"})
        print("SAVED", sorted(p.name for p in Path(folder).glob("*.*")))
    print("LOSSES", losses)


if __name__ == "__main__":
    main()
