"""From text to batches of token ids.

sources/      where text comes from: OpenWebText, parquet, JSON Lines, plain text, Python's own library
tokenizers    text → token ids
prepare       all of a source's text → shards of ids on disk (`python -m data.prepare`)
texts         the texts that have a name: sources of a mixture, and validation sets
corpus        opens what is prepared; prepares small texts on first use
tokens        the shards as one array of ids
mixture       which source each sequence comes from
loader        which sequences make up step n, on which rank, in which order
"""
