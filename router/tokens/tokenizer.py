"""Loads a model's tokenizer from local files, and counts with calls that let other threads run.

Rules: nothing is ever fetched; a missing file is named, with the way to supply it, at load. `encode_batch_fast` (and
tiktoken's `encode_to_numpy`) release the GIL where plain `encode` holds it for the whole text. After loading nothing
is set on a tokenizer again: a setter that runs beside a call raises "Already borrowed". Special tokens written out in
a text count as one each, as the engine counts them.
"""

import base64
import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import tiktoken
import tokenizers
from tiktoken_ext import openai_public  # type: ignore[import-untyped]  # tiktoken types only its own package

from router.request import ChatPrompt
from router.tokens.api import TokenizerUnavailable
from router.tokens.limits import TextLimits, byte_bpe_limits, limits_of
from router.tokens.overhead import ChatOverhead, measure_overhead
from router.tokens.template import ChatRenderer

#: Models whose prompts vLLM builds in code of its own instead of with a chat template. Source: vLLM 0.32,
#: `vllm/config/model.py`, `vllm/renderers/registry.py`, `vllm/entrypoints/openai/chat_completion/serving.py`.
_OWN_RENDERER_ARCHITECTURES = (
    "GptOss",
    "DeepseekV32",
    "DeepseekV4",
    "KimiK3",
    "Inkling",
    "MoonshotKimia",
)
_FETCH_HINT = (
    "fetch it once where there is a network (`hf download MODEL --include '*token*' 'chat_template*' config.json "
    "--local-dir DIR`), or copy these files from the engine's model folder, and set `tokenizer.path` to that folder"
)


class Tokenizer(Protocol):
    """What counting needs of a tokenizer. `count` and `render` block and belong in a worker thread."""

    limits: TextLimits
    #: What the chat template adds to plain chats; None where that is not known.
    overhead: ChatOverhead | None
    #: Whether `count(render(chat))` is what the engine will count.
    is_chat_exact: bool

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """Tokens of one text. May raise anything, pyo3's PanicException (no subclass of Exception) included."""
        ...

    def render(self, chat: ChatPrompt) -> str:
        """The conversation as one text. May raise anything."""
        ...


class HuggingFaceTokenizer:
    """A `tokenizer.json` with the model's chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, renderer: ChatRenderer, *, is_chat_exact: bool) -> None:
        # A file may carry truncation or padding of its training; the engine switches both off.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._renderer = renderer
        self.limits = limits_of(backend.to_str(), special_tokens=backend.num_special_tokens_to_add(is_pair=False))
        self.is_chat_exact = is_chat_exact and renderer.is_available
        self.overhead = measure_overhead(renderer.render) if renderer.is_available else None

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        return len(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0])

    def render(self, chat: ChatPrompt) -> str:
        return self._renderer.render(chat)


class TiktokenTokenizer:
    """A tiktoken encoding. It has no chat template, so chats are laid out in a common form and never exact."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        longest = max(len(token) for token in encoding.token_byte_values())
        longest = max([longest, *(len(token.encode()) for token in encoding.special_tokens_set)])
        self.limits = byte_bpe_limits(longest)
        self.is_chat_exact = False
        self.overhead = measure_overhead(self.render)

    def count(self, text: str, *, add_special_tokens: bool) -> int:  # noqa: ARG002 - these encodings add none
        return len(self._encoding.encode_to_numpy(text, allowed_special="all"))

    def render(self, chat: ChatPrompt) -> str:
        """Each message between markers of about four tokens; tools and calls as compact JSON."""
        tools = chat.tool_list()
        lines = [json.dumps(list(tools), ensure_ascii=False)] if tools else []
        lines += [f"<|start|>{_layout(message)}<|end|>" for message in chat.messages]
        return "\n".join([*lines, "<|start|>assistant" if chat.add_generation_prompt else ""])


def _layout(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    calls = message.get("tool_calls")
    shown = json.dumps(calls, ensure_ascii=False) if calls else ""
    return f"{message.get('role')}: {content or ''}{shown}"


def load_huggingface(path: Path) -> HuggingFaceTokenizer:
    """Load a model's tokenizer from a folder, or from a bare `tokenizer.json` (then without a chat template).

    Raises: TokenizerUnavailable.
    """
    if not path.exists():
        raise TokenizerUnavailable(f"no tokenizer at {path}: {_FETCH_HINT}")
    folder = path if path.is_dir() else path.parent
    has_config = (folder / "tokenizer_config.json").exists()
    if path.is_dir() and not (path / "tokenizer.json").exists():
        raise TokenizerUnavailable(f"{path} has no tokenizer.json: {_FETCH_HINT}")
    loaded = (
        _load_transformers(folder) if has_config else _load_bare(path if path.is_file() else path / "tokenizer.json")
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerUnavailable(f"the tokenizer in {folder} has no fast form (tokenizer.json): {_FETCH_HINT}")
    try:
        renderer = ChatRenderer(loaded, processor_template=_processor_template(folder))
    except Exception as error:
        raise TokenizerUnavailable(f"the chat template in {folder} is not valid: {error}") from error
    return HuggingFaceTokenizer(backend, renderer, is_chat_exact=not _has_own_renderer(folder))


def _load_transformers(folder: Path) -> Any:
    try:
        logging.getLogger("transformers").addFilter(_is_no_torch_advice)
        import jinja2  # noqa: F401 - not a dependency of transformers, which misses it only at the first chat
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerUnavailable(f"a Python package is missing ({error}): install two-pool-router again") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise TokenizerUnavailable(f"the tokenizer in {folder} cannot be loaded ({error}): {_FETCH_HINT}") from error


def _is_no_torch_advice(record: logging.LogRecord) -> bool:
    """False for the advice to install a framework for models, which counting does not need."""
    return "PyTorch" not in record.getMessage()


def _load_bare(file: Path) -> Any:
    import transformers

    make: Any = transformers.PreTrainedTokenizerFast
    try:
        return make(tokenizer_file=str(file))
    except Exception as error:
        raise TokenizerUnavailable(f"{file} cannot be loaded ({error}): {_FETCH_HINT}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none to read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _processor_template(folder: Path) -> str | None:
    """The template of a multimodal processor, which older ones keep in a file of its own."""
    template = _read_json(folder / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _has_own_renderer(folder: Path) -> bool:
    architectures = _read_json(folder / "config.json").get("architectures") or []
    # Mistral's own files make vLLM use Mistral's own tokenizer for chats.
    is_mistral = any(folder.glob("tekken.json")) or any(folder.glob("tokenizer.model.v*"))
    return is_mistral or any(str(name).startswith(_OWN_RENDERER_ARCHITECTURES) for name in architectures)


#: tiktoken's constructors call a module-level loader, which is replaced while one of them runs.
_TIKTOKEN_LOCK = threading.Lock()


def load_tiktoken(encoding: str, folder: Path) -> TiktokenTokenizer:
    """Load a tiktoken encoding from a folder of local files: tiktoken's own cache, or files under their plain names.

    Raises: TokenizerUnavailable.
    """
    constructor = openai_public.ENCODING_CONSTRUCTORS.get(encoding)
    if constructor is None:
        known = ", ".join(sorted(openai_public.ENCODING_CONSTRUCTORS))
        raise TokenizerUnavailable(f"tiktoken has no encoding {encoding!r}; it has {known}")

    def read_ranks(url: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return _ranks(url, expected_hash, folder)

    def no_such_form(*_args: object, **_kwargs: object) -> dict[bytes, int]:
        raise TokenizerUnavailable(f"encoding {encoding!r} is in an old form that is not supported; use r50k_base")

    with _TIKTOKEN_LOCK:
        loaders = openai_public.load_tiktoken_bpe, openai_public.data_gym_to_mergeable_bpe_ranks
        openai_public.load_tiktoken_bpe = read_ranks
        openai_public.data_gym_to_mergeable_bpe_ranks = no_such_form
        try:
            parameters = constructor()
        finally:
            openai_public.load_tiktoken_bpe, openai_public.data_gym_to_mergeable_bpe_ranks = loaders
    return TiktokenTokenizer(tiktoken.Encoding(**parameters))


def _ranks(url: str, expected_hash: str | None, folder: Path) -> dict[bytes, int]:
    """The vocabulary that tiktoken would fetch from `url`, read from `folder`."""
    cached = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
    plain = url.rpartition("/")[2]
    file = next((folder / name for name in (cached, plain) if (folder / name).is_file()), None)
    if file is None:
        raise TokenizerUnavailable(
            f"{folder} has neither {plain} nor {cached}: fetch {url} once where there is a network, put it into that "
            "folder under either name, and set `tokenizer.path` to the folder"
        )
    content = file.read_bytes()
    if expected_hash is not None and hashlib.sha256(content).hexdigest() != expected_hash:
        raise TokenizerUnavailable(f"{file} is not the file it should be (SHA-256 differs): fetch {url} again")
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}
