"""`python -m colabtpu data prepare`: tokenise a corpus now, train on it later.

    python -m colabtpu data prepare                               # the embedded corpus
    python -m colabtpu data prepare imdb_reviews --vocab-size 16384
    python -m colabtpu data prepare texts/ --cache /content/drive/MyDrive/colabtpu-cache

Downloading and tokenising need no accelerator: do them on a free CPU runtime with the cache
on Drive, switch to the TPU, and copy the cache to its local disk. Imports no ML framework.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from colabtpu.data.storage import cache_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare")
    prepare = actions.add_parser("prepare", help="train a tokenizer and tokenise a corpus")
    prepare.add_argument(
        "source", nargs="*", default=["python"], help="a TFDS name, files or folders; python"
    )
    prepare.add_argument("--vocab-size", type=int, default=8192)
    prepare.add_argument("--text-feature", help="the field that holds the text")
    prepare.add_argument("--validation-share", type=float, default=0.05)
    prepare.add_argument("--cache", type=Path, help="where to keep it; $COLABTPU_CACHE")
    prepare.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the verb; returns the exit status."""
    if args.cache:
        os.environ["COLABTPU_CACHE"] = str(args.cache)
    about = _prepare(args)
    if args.json:
        print(json.dumps(about))
        return 0
    for split in ("train", "validation"):
        print(
            f"{split:>10}: {about['num_documents'][split]:,} documents, "
            f"{about['num_bytes'][split]:,} bytes, {about['num_tokens'][split]:,} tokens"
        )
    print(f"tokenizer:  {about['tokenizer']} ({about['vocab_size']:,} entries)")
    print(f"tokens:     {about['tokens']}")
    print(f"To train on it: set COLABTPU_CACHE={cache_dir()} and pass the same source.")
    return 0


def _prepare(args: argparse.Namespace) -> dict[str, Any]:
    from colabtpu.data import corpus, token_cache, tokenizer
    from colabtpu.data.vocabulary import cached_path

    source = args.source[0] if len(args.source) == 1 else [Path(each) for each in args.source]
    text = corpus(source, text_feature=args.text_feature, validation_share=args.validation_share)
    tok = tokenizer(text, args.vocab_size)
    cache = token_cache(text, tok, progress=not args.json)
    return {
        "corpus": text.name,
        "vocab_size": tok.vocab_size,
        "tokenizer": str(cached_path(text, args.vocab_size)),
        "tokens": str(cache.path),
        "num_documents": cache.num_documents,
        "num_tokens": cache.num_tokens,
        "num_bytes": cache.num_bytes,
    }
