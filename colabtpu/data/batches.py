"""Batches for Keras' `fit` on both engines: a batch is a pure function of (seed, step).

    train, valid = lm_batches(corpus, tok, seq_len=512, batch=64, seed=0)
    model.fit(train, validation_data=valid, epochs=3)
    train[1240]                                   # the arrays of step 1,240, at once

`Batches` is a Keras data adapter, which `fit` takes as it is (keras 3.13 to 3.15:
`get_data_adapter`), instead of a `PyDataset`: that one gives TensorFlow a batch axis of
unknown size, which a TPU pads and recompiles for, and always begins an epoch at its start.
Call `ct.connect()` first: this module imports Keras.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from colabtpu.data.cache import token_cache
from colabtpu.data.corpora import Corpus
from colabtpu.data.examples import ArraySpec, Continuous, Examples
from colabtpu.data.lengths import Lengths
from colabtpu.data.packing import BestFit
from colabtpu.data.permutation import shuffled
from colabtpu.data.vocabulary import Tokenizer
from colabtpu.errors import InvalidArgumentError

AHEAD = 2  # batches prepared while the device works on one


def lm_batches(
    corpus: Corpus,
    tok: Tokenizer,
    seq_len: int = 512,
    batch: int = 64,
    seed: int = 0,
    *,
    packing: str = "continuous",
    validation_batches: int | None = None,
    progress: bool = True,
) -> tuple["Batches", "Batches"]:
    """Returns training and validation batches for a causal language model.

    "continuous" packing concatenates documents with separators and cuts them into rows: no
    padding, but a row's later documents see its earlier ones. "best_fit" packing keeps
    documents whole where they fit, and apart: see `colabtpu.data.packing`.

    Training shuffles the rows anew in each pass, without holding them in memory, and goes on
    into the next pass where a batch does not divide them: nothing is dropped but a continuous
    stream's last, incomplete row. Validation takes every token once, in order; what fills up
    its batches has weight 0.

    Args:
        corpus: what `colabtpu.data.corpus` returned.
        tok: its tokenizer.
        seq_len: tokens in a row.
        batch: rows in a global batch, over all replicas and hosts.
        seed: chooses the order of the training rows.
        packing: "continuous" or "best_fit".
        validation_batches: how many batches to validate on, from the split's start; all of
            them if absent.
        progress: whether to show a bar while the corpus is tokenised, which happens once.

    Returns:
        (train, valid). A batch is (tokens, labels) or (tokens, labels, weights), where some
        weights are 0: (batch, seq_len) int32, int32 and float32. Best-fit packing gives, in
        place of the tokens, a dict of `tokens`, `segment_ids` and `positions`, all of that
        shape and int32.

    Raises:
        InvalidArgumentError: `packing` is none of the two, a size is no positive whole
            number, or the corpus has fewer tokens than one row.
    """
    check_positive(seq_len=seq_len, batch=batch, validation_batches=validation_batches)
    if packing not in ("continuous", "best_fit"):
        raise InvalidArgumentError(
            f'`packing` must be "continuous" or "best_fit". Received: packing={packing!r}',
            'Leave it at "continuous" unless documents must not see each other.',
        )
    cache = token_cache(corpus, tok, progress)
    limit = validation_batches and validation_batches * batch
    train: Examples
    valid: Examples
    if packing == "best_fit":
        train = BestFit(cache, "train", seq_len, tok)
        valid = BestFit(cache, "validation", seq_len, tok, limit=limit)
    else:
        train = Continuous(cache, "train", seq_len, tok)
        valid = Continuous(cache, "validation", seq_len, tok, keep_rest=True, limit=limit)
    if not len(train):
        raise InvalidArgumentError(
            f"The training split of {corpus.name!r} has {train.num_tokens:,} tokens. "
            f"Received: seq_len={seq_len}",
            "Use a shorter `seq_len` or more text.",
        )
    return Batches(train, batch, seed=seed), Batches(valid, batch, repeats=False)


class Batches(DataAdapter):
    """Batches of one split, for `fit`, `evaluate`, or by step: `batches[step]`.

    `len()` is the number of steps in an epoch. Training batches go on for ever: `fit` takes
    `len()` of them, or its own `steps_per_epoch`, and a later `fit` goes on where the last
    one ended.

    Args:
        examples: the rows, by number.
        batch: rows in a global batch.
        seed: chooses the order, where rows are shuffled.
        repeats: True for training: shuffled in each pass, endless. False for validation: in
            order, once, batches filled up with rows of weight 0, evenly.
        host: this host's number.
        hosts: how many hosts share a batch; each makes its own rows only, in their order.

    Attributes:
        batch: rows in a global batch.
        seq_len: tokens in a row.
        tokens_per_step: batch x seq_len.
        num_tokens: labels that count, in all rows once.
        num_bytes: bytes of the text that these labels stand for.
        padding_share: share of the positions whose weight is 0.
        spec: shape and dtype of each array of a batch, in its structure.
        step: the step whose batch comes next.
    """

    def __init__(
        self,
        examples: Examples,
        batch: int,
        *,
        seed: int = 0,
        repeats: bool = True,
        host: int | None = None,
        hosts: int | None = None,
    ) -> None:
        self.host, self.hosts = _this_host(host, hosts)
        if batch % self.hosts:
            raise InvalidArgumentError(
                f"`batch` must be a multiple of the {self.hosts} hosts. Received: batch={batch}",
                f"Pass {-(-batch // self.hosts) * self.hosts}.",
            )
        self.examples = examples
        self.batch = batch
        self.seed = seed
        self.repeats = repeats
        self.seq_len = examples.seq_len
        self.tokens_per_step = batch * examples.seq_len
        self.step = 0
        self._first = 0  # where in the coming epoch to begin
        fillers = not repeats and len(examples) % batch > 0
        # The same structure in every batch, whether or not this one holds padding.
        self._weighted = fillers or examples.weighted
        self.spec = keras.tree.map_structure(
            lambda array: ArraySpec(array.shape, array.dtype.name), self[0]
        )
        _begin_epochs_at_a_step()

    def __len__(self) -> int:
        if self.repeats:
            return max(1, len(self.examples) // self.batch)
        return -(-len(self.examples) // self.batch)

    def __getitem__(self, step: int) -> tuple[Any, ...]:
        """Returns this host's rows of the batch of a step, counted from the run's start."""
        numbers = self.example_numbers(step)
        real = numbers >= 0
        x, y, weights = self.examples.fetch(np.where(real, numbers, 0))
        if not self._weighted and weights is None:
            return x, y
        weights = np.ones(y.shape, np.float32) if weights is None else weights
        weights[~real] = 0
        return x, y, weights

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yields the batches of one epoch, from `step` on, without moving it."""
        yield from islice(self.get_numpy_iterator(), len(self))

    def example_numbers(self, step: int) -> np.ndarray:
        """Returns which examples this host's rows hold, (rows,) int64; -1 is a filler."""
        size, rows = len(self.examples), self.batch // self.hosts
        mine = self.host * rows + np.arange(rows, dtype=np.int64)
        if not self.repeats:
            # Fillers spread evenly: Keras averages the batches' losses as if all weighed the same.
            first, end = (size * k // len(self) for k in (step, step + 1))
            return np.where(first + mine < end, first + mine, -1)
        passes, places = np.divmod(step * self.batch + mine, size)
        numbers = np.empty_like(places)
        for each in np.unique(passes):
            numbers[passes == each] = shuffled(places[passes == each], size, (self.seed, each))
        return numbers

    def seek(self, step: int, step_in_epoch: int = 0) -> None:
        """Makes the next epoch of `fit` begin inside: at this step, counted as the second."""
        self.step = step
        self._first = step_in_epoch

    @property
    def num_tokens(self) -> int:
        return self.examples.num_tokens

    @property
    def num_bytes(self) -> int:
        return self.examples.num_bytes

    @property
    def padding_share(self) -> float:
        return self.examples.padding_share

    @property
    def lengths(self) -> Lengths | None:
        """How long the examples are, where they were tokenised one by one."""
        return getattr(self.examples, "lengths", None)

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change for a run to go on with the same batches."""
        return {**self.examples.identity, "batch": self.batch, "seed": self.seed}

    # What Keras asks of a data adapter.

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def batch_size(self) -> int:
        return self.batch

    @property
    def has_partial_batch(self) -> bool:
        return False

    @property
    def partial_batch_size(self) -> None:
        return None

    def get_numpy_iterator(self) -> Iterator[tuple[Any, ...]]:
        """Yields batches from `step` on, the next ones being made by another thread."""
        steps = iter(range(self.step, _FOREVER) if self.repeats else range(len(self)))
        with ThreadPoolExecutor(1, "colabtpu-batches") as pool:
            coming = deque(pool.submit(self.__getitem__, step) for step in islice(steps, AHEAD))
            while coming:
                ready = coming.popleft().result()
                coming.extend(pool.submit(self.__getitem__, step) for step in islice(steps, 1))
                yield ready

    def get_jax_iterator(self) -> Iterator[tuple[Any, ...]]:
        return self.get_numpy_iterator()

    def get_tf_dataset(self) -> Any:
        """Returns a `tf.data.Dataset` with static shapes that begins at `step` each time."""
        import tensorflow as tf

        specs = keras.tree.flatten(self.spec)

        def first_step(_: Any) -> Any:
            return tf.numpy_function(
                lambda: np.int64(self.step if self.repeats else 0), [], tf.int64, stateful=True
            )

        def steps_from(first: Any) -> Any:
            return tf.data.Dataset.range(first, _FOREVER if self.repeats else len(self))

        def arrays_of(step: Any) -> Any:
            arrays = tf.numpy_function(
                lambda number: keras.tree.flatten(self[int(number)]),
                [step],
                [spec.dtype for spec in specs],
            )
            for array, spec in zip(arrays, specs, strict=True):
                array.set_shape(spec.shape)
            return keras.tree.pack_sequence_as(self.spec, arrays)

        steps = tf.data.Dataset.from_tensors(0).map(first_step).flat_map(steps_from)
        return steps.map(arrays_of, num_parallel_calls=AHEAD, deterministic=True).prefetch(AHEAD)


_FOREVER = np.iinfo(np.int64).max


def _this_host(host: int | None, hosts: int | None) -> tuple[int, int]:
    if host is not None and hosts is not None:
        return host, hosts
    if keras.backend.backend() == "jax":
        import jax

        return jax.process_index(), jax.process_count()
    return 0, 1


def check_positive(**sizes: int | None) -> None:
    for name, value in sizes.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (whole and value > 0):
            raise InvalidArgumentError(
                f"`{name}` must be a positive whole number. Received: {name}={value!r}",
                "Pass 1 or more.",
            )


def _begin_epochs_at_a_step() -> None:
    """Lets an epoch of `fit` begin at the batch where an interrupted one ended.

    Keras counts an epoch's batches from 0 in `EpochIterator._enumerate_iterator`, and offers
    no other start (the same code in keras 3.13.2 to 3.15.1). For our batches, and for nothing
    else, this counts from where `Batches.seek` points.
    """
    stock = EpochIterator._enumerate_iterator
    if getattr(stock, "knows_batches", False):
        return

    def enumerate_iterator(self: Any) -> Iterator[tuple[int, int, Any]]:
        batches = self.data_adapter
        if isinstance(batches, Batches):
            return _enumerate_epoch(self, batches)
        return stock(self)

    enumerate_iterator.knows_batches = True  # type: ignore[attr-defined]
    EpochIterator._enumerate_iterator = enumerate_iterator


def _enumerate_epoch(epoch: Any, batches: Batches) -> Iterator[tuple[int, int, Any]]:
    """What Keras' own generator yields: (first step, last step, iterator of batches)."""
    width = epoch.steps_per_execution
    batches.on_epoch_begin()
    stream = iter(epoch._get_iterator())
    for step in range(batches._first, epoch.steps_per_epoch or len(batches), width):
        yield step, step + width - 1, stream
        # Only here is the step known to be done: Keras also looks at a first batch to build
        # the model, and leaves.
        batches._first = 0
        batches.step += width if batches.repeats else 0
    batches.on_epoch_end()
