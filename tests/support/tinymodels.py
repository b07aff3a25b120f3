"""Language models of `transformers` with random weights, two layers deep, as they are published: in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = "0123456789abcdefghij=:#! "


def folder_of(kind: str, into: Path, *, words: str = WORDS, template: str | None = None, rows: int = 0) -> Path:
    """A gpt2, a llama or a mixtral and its tokenizer, of single characters and the pair 40.

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
        config = (transformers.MixtralConfig if kind == "mixtral" else transformers.LlamaConfig)(
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


def bpe_folder(corpus: Path, into: Path, *, vocabulary: int = 512) -> Path:
    """A llama of two layers, width 64, and a byte-level BPE trained on the files of `corpus`."""
    import tokenizers
    import transformers

    cutter = tokenizers.Tokenizer(tokenizers.models.BPE())
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    cutter.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cutter.train([str(path) for path in sorted(corpus.iterdir())], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, eos_token="<|endoftext|>").save_pretrained(into)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(into)
    return into
