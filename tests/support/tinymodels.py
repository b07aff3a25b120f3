"""Language models of `transformers` with random weights, two layers deep, as they are published: in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = "0123456789abcdefghij=:#! "


def folder_of(kind: str, into: Path, *, words: str = WORDS, template: str | None = None, rows: int = 0) -> Path:
    """A gpt2 or a llama and its tokenizer, of single characters and the pair 40.

    Its heads are as wide as vLLM's kernels want them. `rows`: of its embedding, where they are more than its tokens.
    """
    import tokenizers
    import transformers

    vocabulary = {word: n for n, word in enumerate([*words, "40", "<end>"])}
    cutter = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("4", "0")]))
    cutter.decoder = tokenizers.decoders.Fuse()
    words_of = transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, eos_token="<end>")
    words_of.chat_template = template
    words_of.save_pretrained(into)
    end = vocabulary["<end>"]
    shared = {"vocab_size": rows or len(vocabulary), "bos_token_id": end, "eos_token_id": end, "initializer_range": 0.2}
    torch.manual_seed(1)
    if kind == "gpt2":  # tied embeddings, Conv1D
        config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, **shared)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            **shared,
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(into)
    return into
