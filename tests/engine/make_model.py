"""Makes the model that the engine tests serve: a Llama of random weights, 8 million parameters, with a real tokenizer.

    python make_model.py OUT TOKENIZER_JSON CHAT_TEMPLATE

Run by the engine's own Python, so that the files are in the form its transformers writes. The answers are noise; what
is tested is where a request goes and how many tokens it has, and both are real. Seeded: the same files every time.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_POSITIONS_TOKENS = 32_768
HIDDEN = 64
LAYERS = 2


def make(out: Path, tokenizer_json: Path, chat_template: Path) -> None:
    """Write model and tokenizer into the new folder `out`."""
    added = [token["content"] for token in json.loads(tokenizer_json.read_text())["added_tokens"]]
    begin = next(token for token in added if "begin" in token and "sentence" in token)
    end = next(token for token in added if "end" in token and "sentence" in token)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_json),
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        model_max_length=MAX_POSITIONS_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template.read_text()
    tokenizer.save_pretrained(out)

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS_TOKENS,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(out)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
