"""Makes a tiny language model of `transformers` in a folder, to try policies of that kind with on a CPU.

    python examples/tiny_llama.py build/tiny-llama
    swarmnode local --nodes 2 examples/hf.toml --rounds 20

It is a Llama of 0.2 million random numbers, whose tokens are bytes. A model that can write already is used in the same
way: its folder or its name on the hub stands behind `hf:`.
"""

import sys
from pathlib import Path

import tokenizers
import torch
import transformers


def make(folder):
    """Write model and tokenizer into `folder`, as they would be published."""
    cutter = tokenizers.Tokenizer(tokenizers.models.BPE())
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    cutter.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    cutter.train_from_iterator([], trainer)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, eos_token="<end>")
    words.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=words.eos_token_id,
        eos_token_id=words.eos_token_id,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
