"""The data room: corpora, tokenizer, token cache, packing and batches.

    import colabtpu as ct
    corpus = ct.data.corpus("python")                   # or a TFDS name, files, strings
    tok = ct.data.tokenizer(corpus, vocab_size=8192)
    train, valid = ct.data.lm_batches(corpus, tok, seq_len=512, batch=64)
    model.fit(train, validation_data=valid)

Text to tokens needs no ML framework; only the batches import Keras, so call `ct.connect()`
before you make them. Every name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> the module of this package that holds it.
_HOME = {
    "Baselines": "yardsticks",
    "Batches": "batches",
    "Corpus": "corpora",
    "Finding": "input_lint",
    "Lengths": "lengths",
    "Tokenizer": "vocabulary",
    "TokenCache": "cache",
    "baselines": "yardsticks",
    "bits_per_byte": "yardsticks",
    "cache_dir": "storage",
    "chat_batches": "supervised",
    "corpus": "corpora",
    "lint": "input_lint",
    "lm_batches": "batches",
    "plain_chat": "supervised",
    "text_batches": "supervised",
    "token_cache": "cache",
    "tokenizer": "vocabulary",
}

if TYPE_CHECKING:
    from colabtpu.data.batches import Batches, lm_batches
    from colabtpu.data.cache import TokenCache, token_cache
    from colabtpu.data.corpora import Corpus, corpus
    from colabtpu.data.input_lint import Finding, lint
    from colabtpu.data.lengths import Lengths
    from colabtpu.data.storage import cache_dir
    from colabtpu.data.supervised import chat_batches, plain_chat, text_batches
    from colabtpu.data.vocabulary import Tokenizer, tokenizer
    from colabtpu.data.yardsticks import Baselines, baselines, bits_per_byte

__all__ = [
    "Baselines",
    "Batches",
    "Corpus",
    "Finding",
    "Lengths",
    "TokenCache",
    "Tokenizer",
    "baselines",
    "bits_per_byte",
    "cache_dir",
    "chat_batches",
    "corpus",
    "lint",
    "lm_batches",
    "plain_chat",
    "text_batches",
    "token_cache",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colabtpu.data' has no attribute {name!r}")
    value = getattr(import_module(f"colabtpu.data.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
