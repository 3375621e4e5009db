"""How good is a loss? Bits per byte, next to what simple compressors reach on the same bytes.

    bits_per_byte(loss, valid)                 # from nats per token, exactly
    print(baselines(corpus, tok, valid))       # unigram tokens, and xz at its highest setting

Bits per byte compare models with different tokenizers, and models with compressors.
"""

import lzma
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from colabtpu.data.cache import token_cache
from colabtpu.data.corpora import Corpus
from colabtpu.data.vocabulary import Tokenizer

if TYPE_CHECKING:
    from colabtpu.data.batches import Batches


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of two models that learn nothing about order, or only repetition.

    Attributes:
        unigram: token frequencies of the training split, add-one smoothed.
        xz: `lzma` at preset 9 | EXTREME, on the validation text alone.
        num_tokens: validation tokens, separators included.
        num_bytes: validation bytes.
    """

    unigram: float
    xz: float
    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"unigram tokens {self.unigram:.3f}, xz {self.xz:.3f} bits per byte "
            f"({self.num_bytes:,} validation bytes, {self.num_tokens:,} tokens)"
        )


def baselines(corpus: Corpus, tok: Tokenizer, valid: "Batches") -> Baselines:
    """Measures two baselines on exactly the tokens and bytes of the validation batches.

    Args:
        corpus: the corpus; its training split gives the token frequencies.
        tok: its tokenizer.
        valid: the validation batches of `lm_batches`.

    Returns:
        Their bits per byte.
    """
    counts = np.ones(tok.vocab_size)
    tokens = token_cache(corpus, tok).tokens("train")
    for start in range(0, len(tokens), 1 << 24):
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=tok.vocab_size)
    bits_of = -np.log2(counts / counts.sum())
    packer = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    bits, packed = 0.0, 0
    for labels in valid.examples.labels():
        bits += float(bits_of[labels].sum())
        packed += len(packer.compress(tok.decode_bytes(labels)))
    packed += len(packer.flush())
    return Baselines(
        unigram=bits / valid.num_bytes,
        xz=8 * packed / valid.num_bytes,
        num_tokens=valid.num_tokens,
        num_bytes=valid.num_bytes,
    )


def bits_per_byte(nats_per_token: float, valid: "Batches") -> float:
    """Returns the bits per byte of a mean loss over the validation tokens.

    Args:
        nats_per_token: cross-entropy averaged over the labels whose weight is 1.
        valid: the batches it was measured on.
    """
    return nats_per_token / math.log(2) * valid.num_tokens / valid.num_bytes
