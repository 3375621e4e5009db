"""Text from a language model: one compiled loop, whatever the prompt and the length.

    generate(model, tokenizer, "def main(", max_new_tokens=64)            # greedy
    generate(model, tokenizer, prompt, 64, temperature=0.8, top_k=40, seed=1)

A tokenizer is anything with `encode(text) -> int32 array`, `decode(ids) -> str`, `vocab_size`
and `separator_id`. Keys and values are cached; shapes are those of the model's `seq_len`, so
prompts and lengths of any kind share one program, compiled at the first call.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from colabtpu.errors import InvalidArgumentError
from colabtpu.models import attention


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Any:
    """Continues a prompt.

    Args:
        model: a model of `transformer_lm`.
        tokenizer: encodes the prompt and decodes the answer; None when `prompt` is token ids.
        prompt: a text, or int token ids `(length,)`.
        max_new_tokens: how many tokens to add; with the prompt at most the model's `seq_len`.
        temperature: 0 takes the likeliest token; above, samples from logits / temperature.
        top_k: sample among the k likeliest tokens only; None: among all.
        seed: same seed, same sample.

    Returns:
        The prompt and its continuation: a text for a text, cut where the model ends the
        document, or int32 ids `(length + max_new_tokens,)` for ids.

    Raises:
        InvalidArgumentError: a value that cannot work, or too long a prompt.
    """
    spec = model.spec
    as_text = isinstance(prompt, str)
    ids = np.asarray(tokenizer.encode(prompt) if as_text else prompt, dtype="int32").reshape(-1)
    _check(ids, max_new_tokens, temperature, top_k, spec, tokenizer)
    if not len(ids):
        ids = np.asarray([tokenizer.separator_id], dtype="int32")
    length = len(ids) + max_new_tokens
    row = np.zeros((1, spec.seq_len), dtype="int32")
    row[0, : len(ids)] = ids
    numbers = (np.int32(len(ids)), np.int32(length), np.float32(temperature), np.int32(seed))
    out = np.asarray(_compiled(model, top_k)(row, *numbers))[0, :length]
    return _text(tokenizer, out, len(ids)) if as_text else out


def _check(
    ids: np.ndarray, max_new: Any, temperature: float, top_k: Any, spec: Any, tokenizer: Any
) -> None:
    if not isinstance(max_new, int) or max_new < 1:
        raise InvalidArgumentError(
            f"`max_new_tokens` must be a positive whole number. Received: {max_new!r}",
            "Pass how many tokens to add, such as 64.",
        )
    if len(ids) + max_new > spec.seq_len:
        raise InvalidArgumentError(
            f"The prompt and its continuation must fit the model's `seq_len`={spec.seq_len}. "
            f"Received: a prompt of {len(ids)} tokens and max_new_tokens={max_new}",
            f"Shorten the prompt to its last {max(spec.seq_len - max_new, 0)} tokens, "
            "or ask for fewer new ones.",
        )
    if not np.isfinite(temperature) or temperature < 0:
        raise InvalidArgumentError(
            f"`temperature` must be 0 or more. Received: temperature={temperature!r}",
            "Pass 0 for the likeliest token, 0.7 to 1 for variety.",
        )
    if top_k is not None and (not isinstance(top_k, int) or not 1 <= top_k <= spec.vocab_size):
        raise InvalidArgumentError(
            f"`top_k` must be between 1 and the vocabulary size {spec.vocab_size}. "
            f"Received: top_k={top_k!r}",
            "Pass 40, or None for no limit.",
        )
    if not len(ids) and tokenizer is None:
        raise InvalidArgumentError(
            "`prompt` holds no token. Received: an empty list of ids",
            "Pass at least one id, such as the tokenizer's `separator_id`.",
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < spec.vocab_size:
        raise InvalidArgumentError(
            f"Token ids must lie in 0..{spec.vocab_size - 1}. "
            f"Received: ids from {ids.min()} to {ids.max()}",
            "Use the tokenizer that the model was trained with.",
        )


def _text(tokenizer: Any, ids: np.ndarray, prompt_length: int) -> str:
    new = ids[prompt_length:]
    ends = np.flatnonzero(new == getattr(tokenizer, "separator_id", -1))
    stop = prompt_length + (ends[0] if len(ends) else len(new))
    start = int(ids[0] == getattr(tokenizer, "separator_id", -1))
    return tokenizer.decode(ids[start:stop])


def _compiled(model: Any, top_k: int | None) -> Any:
    """Returns the compiled loop of this model, made once for each `top_k`."""
    cache = model.__dict__.setdefault("_generate_functions", {})
    if top_k not in cache:
        make = _jax_function if keras.backend.backend() == "jax" else _tensorflow_function
        cache[top_k] = make(model, top_k)
    return cache[top_k]


def _jax_function(model: Any, top_k: int | None) -> Any:
    import jax

    @jax.jit
    def compiled(values: list[Any], *inputs: Any) -> Any:
        mapping = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return _loop(model, top_k, *inputs)

    return lambda *inputs: compiled([v.value for v in model.variables], *inputs)


def _tensorflow_function(model: Any, top_k: int | None) -> Any:
    import tensorflow as tf

    compiled = tf.function(lambda *inputs: _loop(model, top_k, *inputs), autograph=False)

    def call(*inputs: Any) -> Any:
        tensors = [tf.convert_to_tensor(value) for value in inputs]
        strategy = model.distribute_strategy
        if "TPU" not in type(strategy).__name__:
            return compiled(*tensors)
        # Outside `run` a TPUStrategy would place the loop on the host's CPU.
        return strategy.experimental_local_results(strategy.run(compiled, tensors))[0]

    return call


def _loop(
    model: Any, top_k: int | None, row: Any, prompt_length: Any, length: Any, temperature: Any,
    seed: Any,
) -> Any:  # fmt: skip
    """Fills `row` (1, seq) up to `length`, one token a turn, the prompt's own first."""
    empty = tuple(block.empty_cache(1, model.compute_dtype) for block in model.blocks)

    def unfinished(position: Any, row: Any, caches: Any) -> Any:
        return position < length - 1

    def turn(position: Any, row: Any, caches: Any) -> Any:
        token = ops.slice(row, (0, position), (1, 1))
        logits, caches = _decode(model, token, caches, position)
        choice = _choose(logits, top_k, temperature, seed, position)
        given = ops.slice(row, (0, position + 1), (1, 1))
        chosen = ops.where(position + 1 < prompt_length, given, ops.reshape(choice, (1, 1)))
        return position + 1, ops.slice_update(row, (0, position + 1), chosen), caches

    start = ops.convert_to_tensor(0, dtype="int32")
    row = ops.convert_to_tensor(row, dtype="int32")
    return ops.while_loop(unfinished, turn, (start, row, empty))[1]


def _decode(model: Any, token: Any, caches: Any, position: Any) -> tuple[Any, Any]:
    hidden = model.embedding(token)
    if model.position_table is not None:
        hidden = model.position_table(hidden, ops.reshape(position, (1, 1)))
    new = []
    for block, cache in zip(model.blocks, caches, strict=True):
        hidden, cache = block.decode(hidden, cache, position)
        new.append(cache)
    return model.embedding(model.final_norm(hidden), reverse=True)[0, 0], tuple(new)


def _choose(logits: Any, top_k: int | None, temperature: Any, seed: Any, position: Any) -> Any:
    """Returns the likeliest token at temperature 0, else a Gumbel-max sample."""
    allowed = logits
    if top_k is not None:
        smallest = ops.top_k(logits, top_k)[0][-1]
        allowed = ops.where(logits < smallest, attention.MASKED, logits)
    noise = -ops.log(-ops.log(_uniform(logits.shape, seed, position)))
    sampled = ops.argmax(allowed / ops.maximum(temperature, 1e-6) + noise, axis=-1)
    greedy = ops.argmax(logits, axis=-1)
    return ops.cast(ops.where(temperature > 0, sampled, greedy), "int32")


def _uniform(shape: Any, seed: Any, position: Any) -> Any:
    """Returns uniform numbers in (0, 1) that depend on the seed and the position alone."""
    tiny = 1e-7
    if keras.backend.backend() == "jax":
        import jax

        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.uniform(key, shape, minval=tiny, maxval=1 - tiny)
    import tensorflow as tf

    return tf.random.stateless_uniform(shape, tf.stack([seed, position]), tiny, 1 - tiny)
