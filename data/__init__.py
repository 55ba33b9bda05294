"""From text to batches of token ids.

settings      what can be set
recipe        settings → what each text of a run is made of, and the folder of its tokens
sources/      a module for each kind of text: parquet, JSON Lines, plain text, the Hugging Face Hub
tokenizers    text → token ids
prepare       a text → shards of ids on disk (`python -m data.prepare`), by workers
corpus        opens what is prepared; prepares small texts on first use
tokens        the shards as one array of ids
mixture       which source each sequence comes from
loader        which sequences make up step n, on which rank, in which order
"""
