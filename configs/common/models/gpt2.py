"""GPT-2, with the vocabulary and the length that the data has."""

from transformers import GPT2Config, GPT2LMHeadModel

from graphckpt.config import LazyCall

model = LazyCall(GPT2LMHeadModel)(
    config=LazyCall(GPT2Config)(
        vocab_size="${data.vocab_size}",
        n_positions="${data.seq_length}",
        n_layer=12,
        n_head=12,
        n_embd=768,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,  # the end of a text, in a tokenizer trained by graphckpt.train.data
        eos_token_id=0,
    )
)
