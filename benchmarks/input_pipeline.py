"""How many tokens a second reach the device's door? `python benchmarks/input_pipeline.py`

Reads batches of 64 x 1,024 tokens as `fit` would take them, from a corpus of short texts
(about 300 tokens, log-normal), and compares with what people write by hand:

(a) a `tf.data` pipeline that tokenises on the fly, on all cores, each text padded to a row;
(b) token ids from memory, each text padded to a row, by `tf.data`'s `padded_batch`.

Counts useful tokens, not padding. The aim: 10 x what a v6e-1 takes in the best public run,
433,606 tokens/s (GPT-2 small; facts/anchors.md, D.1). Prints one JSON line with --json.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

BATCH, SEQ_LEN = 64, 1024
V6E_TOKENS_PER_SECOND = 433_606
FACTOR = 10


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each measurement")
    parser.add_argument("--texts", type=int, default=6_000)
    parser.add_argument("--engine", choices=("tensorflow", "jax"), default="tensorflow")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["KERAS_BACKEND"] = args.engine
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COLABTPU_CACHE"] = folder
        results = measure(args)
    if args.json:
        print(json.dumps(results))
        return
    aim = FACTOR * V6E_TOKENS_PER_SECOND
    print(f"{os.cpu_count()} cores, {args.engine}; aim {aim:,} useful tokens/s, padding < 1 %")
    slowest = results[-1]["tokens_per_second"]
    for each in results:
        rate = each["tokens_per_second"]
        print(
            f"{each['name']:<44} {rate:>12,.0f} tokens/s  {rate / V6E_TOKENS_PER_SECOND:6.1f} x "
            f"v6e-1  {rate / slowest:7.1f} x (a)  padding {each['padding_share']:.2%}"
        )


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns tokens/s and padding of our packings and of both baselines, (a) last."""
    from colabtpu import data

    corpus = data.corpus(_texts(args.texts))
    tok = data.tokenizer(corpus, 8192)
    results = []
    for packing in ("continuous", "best_fit"):
        train, _ = data.lm_batches(corpus, tok, SEQ_LEN, BATCH, packing=packing, progress=False)
        adapter = iter(train.get_tf_dataset()) if args.engine == "tensorflow" else None
        batches = adapter or train.get_jax_iterator()
        useful = train.tokens_per_step * (1 - train.padding_share)
        rate = _rate(batches, lambda batch, useful=useful: useful, args.seconds)
        results.append(_result(f"colabtpu, {packing} packing", rate, train.padding_share))
    ids = [tok.encode(text)[:SEQ_LEN] for text in corpus.documents("train")]
    padding = 1 - sum(map(len, ids)) / (len(ids) * SEQ_LEN)
    rate = _rate(_padded(ids), _useful, args.seconds)
    results.append(_result("(b) ids in memory, each text padded", rate, padding))
    texts = list(corpus.documents("train"))
    rate = _rate(_on_the_fly(texts, tok), _useful, args.seconds)
    results.append(_result("(a) tf.data, tokenised on the fly, padded", rate, padding))
    return results


def _texts(count: int) -> Iterator[str]:
    """Texts cut from the standard library, with the lengths that stories and reviews have."""
    import numpy as np

    from colabtpu.data.python_text.python_text_dataset_builder import python_texts

    whole = "\n".join(text for _, text in python_texts())
    draw = np.random.default_rng(0)
    sizes = draw.lognormal(mean=6.7, sigma=0.8, size=count).astype(int) + 40
    starts = draw.integers(0, len(whole) - sizes.max(), count)
    return (whole[start : start + size] for start, size in zip(starts, sizes, strict=True))


def _padded(ids: list[Any]) -> Iterator[Any]:
    import tensorflow as tf

    spec = tf.TensorSpec([None], tf.int32)
    texts = tf.data.Dataset.from_generator(lambda: iter(ids), output_signature=spec).cache()
    texts = texts.shuffle(4096, seed=0).repeat()
    rows = texts.padded_batch(BATCH, [SEQ_LEN], drop_remainder=True)
    return iter(rows.prefetch(tf.data.AUTOTUNE))


def _on_the_fly(texts: list[str], tok: Any) -> Iterator[Any]:
    import tensorflow as tf

    def encode(batch: Any) -> Any:
        import numpy as np

        rows = np.zeros((BATCH, SEQ_LEN), np.int32)
        for row, ids in zip(rows, tok.encode_batch([t.decode() for t in batch]), strict=True):
            row[: len(ids)] = ids[:SEQ_LEN]
        return rows

    source = tf.data.Dataset.from_tensor_slices(texts).shuffle(4096, seed=0).repeat()
    batches = source.batch(BATCH, drop_remainder=True)
    rows = batches.map(lambda b: tf.numpy_function(encode, [b], tf.int32), tf.data.AUTOTUNE)
    return iter(rows.prefetch(tf.data.AUTOTUNE))


def _useful(rows: Any) -> float:
    return float((rows.numpy() != 0).sum())


def _rate(batches: Iterator[Any], useful: Any, seconds: float) -> float:
    for _ in range(10):  # caches, page cache, the pipeline's threads
        next(batches)
    start, tokens = time.perf_counter(), 0.0
    while time.perf_counter() - start < seconds:
        tokens += useful(next(batches))
    return tokens / (time.perf_counter() - start)


def _result(name: str, rate: float, padding: float) -> dict[str, Any]:
    return {"name": name, "tokens_per_second": rate, "padding_share": padding}


if __name__ == "__main__":
    main()
