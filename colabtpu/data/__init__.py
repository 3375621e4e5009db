"""The data room: corpora, tokenizer, packing and batches."""
