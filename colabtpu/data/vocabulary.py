"""A byte-level BPE tokenizer, trained on a corpus: any text goes in and comes out unchanged.

    tok = tokenizer(corpus, vocab_size=8192)
    tok.decode(tok.encode("def f(x):")) == "def f(x):"
    tok.save("tokenizer.json"); tok = Tokenizer.load("tokenizer.json")

The file is a Hugging Face `tokenizer.json`, readable by `tokenizers` and `transformers`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colabtpu.data.corpora import Corpus
from colabtpu.data.storage import cache_dir, write_atomically
from colabtpu.errors import InvalidArgumentError

SEPARATOR = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the separator
SAMPLE_BYTES = 64 << 20  # merges hardly change past this much text, and training takes minutes


def tokenizer(corpus: Corpus, vocab_size: int = 8192) -> "Tokenizer":
    """Trains a byte-level BPE tokenizer on the training split, or loads it from the cache.

    The same corpus and size give the same tokenizer. A corpus larger than 64 MiB is sampled:
    the first 64 MiB of its training split.

    Args:
        corpus: what `colabtpu.data.corpus` returned.
        vocab_size: entries to aim for, separator included, 257 or more. A small corpus may
            hold fewer merges; `Tokenizer.vocab_size` says how many there are.

    Returns:
        The tokenizer.

    Raises:
        InvalidArgumentError: `vocab_size` is below 257.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InvalidArgumentError(
            f"`vocab_size` must leave room for the 256 bytes and a separator. "
            f"Received: vocab_size={vocab_size}",
            f"Pass {SMALLEST_VOCABULARY} or more; 8192 suits a small model.",
        )
    path = cached_path(corpus, vocab_size)
    if not path.exists():
        trained = _train(corpus, vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, trained.to_str().encode())
    return Tokenizer.load(path)


def cached_path(corpus: Corpus, vocab_size: int) -> Path:
    """Returns where `tokenizer` keeps what it trained."""
    return cache_dir() / "tokenizers" / _training_key(corpus, vocab_size) / "tokenizer.json"


class Tokenizer:
    """Text to token ids and back; ids are below `vocab_size`."""

    def __init__(self, backend: Any) -> None:
        # A text that happens to contain "<|endoftext|>" must not end a document.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        self.separator_id: int = backend.token_to_id(SEPARATOR)
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]
        self._bytes = _token_bytes(backend, self.vocab_size, self.separator_id)
        self.byte_lengths = np.array([len(token) for token in self._bytes], np.int32)
        """How many bytes of text each id stands for, (vocab_size,) int32; 0 for the separator."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, (tokens,) int32, without a separator."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text; the work is spread over the machine's cores."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidArgumentError(
                f"A text is no string, or holds half a surrogate pair: {error}",
                'Repair it first: text.encode("utf-16", "surrogatepass").decode("utf-16", '
                '"replace").',
            ) from error
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of some ids; separators become nothing, half characters "\\ufffd"."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the exact bytes that some ids stand for."""
        return b"".join([self._bytes[i] for i in np.asarray(ids).reshape(-1).tolist()])

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer to a `tokenizer.json`."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), self._backend.to_str(pretty=True).encode())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads what `save` wrote."""
        import tokenizers

        if not Path(path).is_file():
            raise InvalidArgumentError(
                f"There is no tokenizer at {str(path)!r}.",
                "Pass the path that Tokenizer.save() was given.",
            )
        backend = tokenizers.Tokenizer.from_file(str(path))
        if backend.token_to_id(SEPARATOR) is None:
            raise InvalidArgumentError(
                f"The tokenizer at {str(path)!r} has no token {SEPARATOR!r}.",
                "Train one with colabtpu.data.tokenizer(corpus).",
            )
        return cls(backend)


def _train(corpus: Corpus, vocab_size: int) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(corpus), trainer)
    return backend


def _sample(corpus: Corpus) -> Iterator[str]:
    taken = 0
    for text in corpus.documents("train"):
        yield text
        taken += len(text)
        if taken >= SAMPLE_BYTES:
            return


def _training_key(corpus: Corpus, vocab_size: int) -> str:
    import tokenizers

    what = f"bpe-1 {tokenizers.__version__} {corpus.fingerprint} {vocab_size} {SAMPLE_BYTES}"
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def _token_bytes(backend: Any, vocab_size: int, separator_id: int) -> list[bytes]:
    """The bytes of every id, from the printable stand-ins that byte-level BPE uses for them."""
    byte_of = _byte_of_stand_in()
    tokens = [backend.id_to_token(i) for i in range(vocab_size)]
    return [
        b"" if i == separator_id else bytes(byte_of[character] for character in token)
        for i, token in enumerate(tokens)
    ]


def _byte_of_stand_in() -> dict[str, int]:
    # GPT-2's table: printable Latin-1 bytes stand for themselves, the others take the
    # characters from U+0100 on, in order.
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in themselves]
    table = {chr(byte): byte for byte in themselves}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}
