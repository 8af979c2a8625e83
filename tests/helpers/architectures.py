"""Tiny models of many Transformers architectures, each with inputs, a loss and its repeated layers.

Every one is in train mode, has dropout where its architecture has it, keeps ``use_cache`` at its default,
and runs forward and backward on a CPU in about 5 ms without a warning (``ledger/test_plain_models.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Legend: B batch, T tokens, D width, V vocabulary, H height and width of an image
B, T, D, V, H = 2, 12, 32, 64, 32


def _ids(length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, V, (B, length), generator=torch.Generator().manual_seed(seed))


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _text() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


@dataclass(frozen=True)
class Architecture:
    """One architecture at its smallest, built the same at every call."""

    name: str
    model: str
    """Name of the model class in ``transformers``."""
    layers: str
    """Pattern of the repeated layers' paths; ``*`` is one component."""
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = _text
    """Builds the keyword arguments, labels included."""
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    has_dropout: bool = True
    """Whether two runs in train mode differ, because the architecture drops something at random."""

    def build(self) -> nn.Module:
        """Builds the model in train mode, always with the same weights; the random stream stays."""
        model_class = getattr(transformers, self.model)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return model_class(model_class.config_class(**self.config)).train()

    def layer_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Returns the modules that :attr:`layers` names, by path."""
        pattern = re.compile(re.escape(self.layers).replace(r"\*", r"[^.]+"))
        return {path: module for path, module in model.named_modules() if pattern.fullmatch(path)}


def _padded_text() -> dict[str, Tensor]:
    mask_BT = torch.ones(B, T, dtype=torch.long)
    mask_BT[1, T // 2 :] = 0
    return {"input_ids": _ids(), "attention_mask": mask_BT, "labels": _ids(seed=3)}


def _sequence_pair() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "labels": _ids(length=T // 2, seed=3)}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": _noise(B, 3, H, H), "labels": torch.tensor([0, 1])}


def _speech() -> dict[str, Tensor]:
    return {"input_values": _noise(B, 800), "labels": _ids(length=3)}


def _spectrogram() -> dict[str, Tensor]:
    return {"input_features": _noise(B, 8, 40), "labels": _ids()}


def _image_and_text() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "pixel_values": _noise(B, 3, H, H), "return_loss": torch.tensor(True)}


_TOKENS = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_POSITIONS = {"max_position_embeddings": 32}
_SIZES = {"hidden_size": D, "num_hidden_layers": 3, "num_attention_heads": 4}
_WIDE = _SIZES | {"intermediate_size": 2 * D}
_FEW = {"n_layer": 3, "n_head": 4}
_GPT = _TOKENS | _FEW | {"n_embd": D, "n_positions": 32}
_DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_P_DROPS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
_HEADS = {"num_key_value_heads": 2, "head_dim": D // 4}
_LLAMA = _TOKENS | _WIDE | _HEADS | _POSITIONS | {"attention_dropout": 0.1}
_OPT = {"word_embed_proj_dim": D, "ffn_dim": 2 * D, "attention_dropout": 0.1}
_NEO = {"hidden_size": D, "num_layers": 2, "num_heads": 4, "window_size": 4, "resid_dropout": 0.1, "embed_dropout": 0.1}
_NEO |= {"attention_types": [[["global", "local"], 1]], "attention_dropout": 0.1}
_MPT = {"d_model": D, "n_layers": 3, "n_heads": 4, "max_seq_len": 32}
_CTRL = _FEW | {"vocab_size": V, "n_embd": D, "dff": 2 * D, "n_positions": 32}
_XLNET = _FEW | {"d_model": D, "d_inner": 2 * D, "dropout": 0.1}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": D, "shared_expert_intermediate_size": D}
_MAMBA = _TOKENS | {"hidden_size": D, "state_size": 4, "num_hidden_layers": 3}
_MAMBA_2 = _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
_RWKV = {"hidden_size": D, "attention_hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 3}
_GRIFFIN = {"lru_width": D, "attention_window_size": 4, "block_types": ["recurrent", "attention"]}
_BERT = _WIDE | _POSITIONS | {"vocab_size": V, "pad_token_id": 0}
_DROPS_PROB = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_ALBERT = _BERT | _DROPS_PROB | {"embedding_size": 16}
_DISTILLED = {"vocab_size": V, "pad_token_id": 0, "dim": D, "hidden_dim": 2 * D, "n_layers": 3, "n_heads": 4}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
_MODERN = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 4}
_MODERN |= {"attention_dropout": 0.1, "mlp_dropout": 0.1}
_T5 = {"vocab_size": V, "d_model": D, "d_kv": D // 4, "d_ff": 2 * D, "num_layers": 2, "num_heads": 4}
_ENDS = {"decoder_start_token_id": 1, "forced_eos_token_id": 2, "max_position_embeddings": 32}
_BART = _TOKENS | _ENDS | {"d_model": D, "attention_dropout": 0.1, "activation_dropout": 0.1}
for _side in ("encoder", "decoder"):
    _BART |= {f"{_side}_layers": 2, f"{_side}_attention_heads": 4, f"{_side}_ffn_dim": 2 * D}
_VIT = _WIDE | _DROPS_PROB | {"image_size": H, "patch_size": 8}
_SWIN = {"image_size": H, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
_SWIN |= _DROPS_PROB | {"drop_path_rate": 0.5}
_STAGES = {"hidden_sizes": [16, 32], "depths": [2, 2]}
_CONVNEXT = _STAGES | {"num_stages": 2, "drop_path_rate": 0.5, "layer_scale_init_value": 1.0}
_RESNET = _STAGES | {"embedding_size": 16, "layer_type": "basic"}
_SPEECH = _WIDE | {"vocab_size": V, "pad_token_id": 0, "num_feat_extract_layers": 2}
_SPEECH |= {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 4)}
_SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0}
_SPEECH |= {"mask_time_prob": 0.0}  # drawn by numpy, so a torch seed would not repeat it
_MEL = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
_CLIP = {
    "text_config": _LLAMA,
    "vision_config": _WIDE | {"image_size": H, "patch_size": 8, "attention_dropout": 0.1},
    "projection_dim": 16,
}

ARCHITECTURES = (
    # ---- decoders
    Architecture("gpt2", "GPT2LMHeadModel", "transformer.h.*", _GPT),
    Architecture("llama", "LlamaForCausalLM", "model.layers.*", _LLAMA, _padded_text),
    Architecture("mistral", "MistralForCausalLM", "model.layers.*", _LLAMA | {"sliding_window": 4}),
    Architecture("qwen2", "Qwen2ForCausalLM", "model.layers.*", _LLAMA),
    Architecture("qwen3", "Qwen3ForCausalLM", "model.layers.*", _LLAMA),
    Architecture("gemma", "GemmaForCausalLM", "model.layers.*", _LLAMA),
    Architecture("gemma2", "Gemma2ForCausalLM", "model.layers.*", _LLAMA | {"sliding_window": 4}),
    Architecture("gemma3", "Gemma3ForCausalLM", "model.layers.*", _LLAMA | {"sliding_window": 4}),
    Architecture("phi", "PhiForCausalLM", "model.layers.*", _LLAMA | _P_DROPS),
    Architecture("phi3", "Phi3ForCausalLM", "model.layers.*", _LLAMA | _P_DROPS),
    Architecture("olmo", "OlmoForCausalLM", "model.layers.*", _LLAMA),
    Architecture("olmo2", "Olmo2ForCausalLM", "model.layers.*", _LLAMA),
    Architecture("stablelm", "StableLmForCausalLM", "model.layers.*", _LLAMA | {"hidden_dropout": 0.1}),
    Architecture("cohere", "CohereForCausalLM", "model.layers.*", _LLAMA),
    Architecture("granite", "GraniteForCausalLM", "model.layers.*", _LLAMA),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "model.layers.*", _LLAMA | {"residual_dropout": 0.1}),
    Architecture("falcon", "FalconForCausalLM", "transformer.h.*", _TOKENS | _SIZES | _DROPS),
    Architecture("bloom", "BloomForCausalLM", "transformer.h.*", _TOKENS | _DROPS | _FEW | {"hidden_size": D}),
    Architecture("opt", "OPTForCausalLM", "model.decoder.layers.*", _TOKENS | _SIZES | _POSITIONS | _OPT),
    Architecture("gpt_neo", "GPTNeoForCausalLM", "transformer.h.*", _TOKENS | _POSITIONS | _NEO),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.layers.*", _TOKENS | _WIDE | _DROPS),
    Architecture("gptj", "GPTJForCausalLM", "transformer.h.*", _GPT | _P_DROPS | {"rotary_dim": 4, "attn_pdrop": 0.1}),
    # its dropout has no rate: Transformers 5.23 takes whole numbers only
    Architecture("mpt", "MptForCausalLM", "transformer.blocks.*", _TOKENS | _MPT, has_dropout=False),
    Architecture("ctrl", "CTRLLMHeadModel", "transformer.h.*", _CTRL),
    Architecture("gpt_bigcode", "GPTBigCodeForCausalLM", "transformer.h.*", _GPT),
    Architecture("xlnet", "XLNetLMHeadModel", "transformer.layer.*", _TOKENS | _XLNET),
    # ---- mixtures of experts
    Architecture("mixtral", "MixtralForCausalLM", "model.layers.*", _LLAMA | {"num_local_experts": 4}),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", "model.layers.*", _LLAMA | _MOE | {"output_router_logits": True}),
    Architecture(
        "gpt_oss", "GptOssForCausalLM", "model.layers.*", _LLAMA | {"num_local_experts": 4, "sliding_window": 4}
    ),
    # ---- state spaces and recurrences
    Architecture("mamba", "MambaForCausalLM", "backbone.layers.*", _MAMBA, has_dropout=False),
    Architecture("mamba2", "Mamba2ForCausalLM", "backbone.layers.*", _MAMBA_2, has_dropout=False),
    Architecture("rwkv", "RwkvForCausalLM", "rwkv.blocks.*", _TOKENS | _RWKV, has_dropout=False),
    Architecture("recurrent_gemma", "RecurrentGemmaForCausalLM", "model.layers.*", _LLAMA | _GRIFFIN),
    # ---- encoders
    Architecture("bert", "BertForMaskedLM", "bert.encoder.layer.*", _BERT, _padded_text),
    Architecture("roberta", "RobertaForMaskedLM", "roberta.encoder.layer.*", _BERT | {"max_position_embeddings": 40}),
    Architecture("albert", "AlbertForMaskedLM", "albert.encoder.albert_layer_groups.*", _ALBERT),
    Architecture("electra", "ElectraForMaskedLM", "electra.encoder.layer.*", _BERT | {"embedding_size": 16}),
    Architecture("distilbert", "DistilBertForMaskedLM", "distilbert.transformer.layer.*", _DISTILLED | _POSITIONS),
    Architecture("deberta_v2", "DebertaV2ForMaskedLM", "deberta.encoder.layer.*", _BERT | _DEBERTA),
    Architecture("modernbert", "ModernBertForMaskedLM", "model.layers.*", _BERT | _MODERN),
    Architecture("fnet", "FNetForMaskedLM", "fnet.encoder.layer.*", _BERT),
    # ---- encoder and decoder
    Architecture("t5", "T5ForConditionalGeneration", "*.block.*", _T5 | {"decoder_start_token_id": 0}, _sequence_pair),
    Architecture("bart", "BartForConditionalGeneration", "model.*.layers.*", _BART, _sequence_pair),
    Architecture("mbart", "MBartForConditionalGeneration", "model.*.layers.*", _BART, _sequence_pair),
    Architecture("pegasus", "PegasusForConditionalGeneration", "model.*.layers.*", _BART, _sequence_pair),
    # ---- vision
    Architecture("vit", "ViTForImageClassification", "vit.layers.*", _VIT, _image),
    Architecture("deit", "DeiTForImageClassification", "deit.layers.*", _VIT, _image),
    Architecture("beit", "BeitForImageClassification", "beit.layers.*", _VIT | {"drop_path_rate": 0.5}, _image),
    Architecture("dinov2", "Dinov2ForImageClassification", "dinov2.encoder.layer.*", _VIT, _image),
    Architecture("swin", "SwinForImageClassification", "swin.encoder.layers.*.blocks.*", _SWIN, _image),
    Architecture("convnext", "ConvNextForImageClassification", "convnext.encoder.stages.*.layers.*", _CONVNEXT, _image),
    Architecture(
        "resnet", "ResNetForImageClassification", "resnet.encoder.stages.*.layers.*", _RESNET, _image, has_dropout=False
    ),
    # ---- audio
    Architecture("wav2vec2", "Wav2Vec2ForCTC", "wav2vec2.encoder.layers.*", _SPEECH, _speech),
    Architecture("hubert", "HubertForCTC", "hubert.encoder.layers.*", _SPEECH, _speech),
    Architecture("whisper", "WhisperForConditionalGeneration", "model.*.layers.*", _BART | _MEL, _spectrogram),
    # ---- image and text
    Architecture("clip", "CLIPModel", "*.encoder.layers.*", _CLIP, _image_and_text),
)
