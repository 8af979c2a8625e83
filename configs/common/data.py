"""Text: without paths, the source text of Python's standard library."""

from graphckpt.config import LazyCall
from graphckpt.train.data import TextData

data = LazyCall(TextData)(
    paths=None,  # or text files and folders: ["~/texts", "notes.txt"]
    dataset=None,  # or a Hugging Face data set by its name: "Salesforce/wikitext"
    dataset_config=None,
    dataset_split="train",
    text_column="text",
    label_column=None,
    tokenizer_file=None,  # or a tokenizer.json, in place of one that is trained on the text
    vocab_size=8192,
    seq_length=256,
    eval_fraction=0.05,  # of the files, held out
    max_bytes=None,  # of text, or all
    cache_dir=None,
)
