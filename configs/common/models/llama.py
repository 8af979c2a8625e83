"""Llama, with the vocabulary and the length that the data has."""

from transformers import LlamaConfig, LlamaForCausalLM

from graphckpt.config import LazyCall

model = LazyCall(LlamaForCausalLM)(
    config=LazyCall(LlamaConfig)(
        vocab_size="${data.vocab_size}",
        max_position_embeddings="${data.seq_length}",
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
        bos_token_id=0,  # the end of a text, in a tokenizer trained by graphckpt.train.data
        eos_token_id=0,
    )
)
