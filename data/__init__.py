"""From text to batches of token ids.

sources/      where text comes from: OpenWebText, parquet, JSON Lines, plain text, Python's own library
tokenizers    text → token ids
prepare       all of a source's text → shards of ids on disk (`python -m data.prepare`)
corpus        opens what is prepared; prepares small texts on first use
tokens        the shards as one array of ids
loader        which sequences make up step n, on which rank, in which order
"""
