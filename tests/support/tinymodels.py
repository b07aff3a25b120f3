"""Language models of `transformers` with random weights, two layers deep, as they are published: in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = {word: n for n, word in enumerate([*"0123456789abcdefghij=:#! ", "<end>"])}


def folder_of(kind: str, into: Path) -> Path:
    """A gpt2 or a llama and its tokenizer, with heads as wide as vLLM's kernels want them."""
    import tokenizers
    import transformers

    cutter = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=WORDS, merges=[]))
    cutter.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, eos_token="<end>").save_pretrained(into)
    shared = {"vocab_size": len(WORDS), "bos_token_id": WORDS["<end>"], "eos_token_id": WORDS["<end>"]}
    torch.manual_seed(1)
    if kind == "gpt2":  # tied embeddings, Conv1D
        config = transformers.GPT2Config(
            n_layer=2, n_embd=64, n_head=2, n_positions=64, initializer_range=0.2, **shared
        )
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.2,
            **shared,
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(into)
    return into
