"""BERT with both of its tasks, with the vocabulary that the data has."""

from transformers import BertConfig, BertForPreTraining

from graphckpt.config import LazyCall

model = LazyCall(BertForPreTraining)(
    config=LazyCall(BertConfig)(
        vocab_size="${data.vocab_size}",
        max_position_embeddings=512,
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        pad_token_id=1,  # of a tokenizer that graphckpt.train.data trains: the first after the end of a text
    )
)
