"""Loading tokenizers from local files."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from router.config.model import TokenizerConfig
from router.request import ChatPrompt
from router.tokens.api import TokenizerUnavailable
from router.tokens.count import build_counter
from router.tokens.tokenizer import TiktokenTokenizer, load_huggingface, load_tiktoken
from tests.tokens.model_folder import make_model_folder, small_tokenizer_json

USER = {"role": "user", "content": "hi"}


def _config(**changes: Any) -> TokenizerConfig:
    fields: dict[str, Any] = {"kind": "huggingface", "path": None, "encoding": None}
    return TokenizerConfig(**(fields | {"exact": "auto", "image_tokens": 1000, "timeout_s": 5.0} | changes))


def _tiny_encoding() -> tiktoken.Encoding:
    ranks = {bytes([value]): value for value in range(256)} | {b"ab": 256, b"abab": 257}
    return tiktoken.Encoding("tiny", pat_str=r".|\n", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})


def test_a_local_folder_loads_without_any_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_args: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)

    tokenizer = load_huggingface(make_model_folder(tmp_path / "local", small=True))

    assert tokenizer.count("hello<｜end▁of▁sentence｜>", add_special_tokens=False) == 6
    assert tokenizer.is_chat_exact


@pytest.mark.parametrize("name", ["nowhere", "Qwen/Qwen3-8B"])
def test_a_missing_folder_is_named_with_the_way_to_supply_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(TokenizerUnavailable, match="hf download") as caught:
        build_counter(_config(path=tmp_path / name), model="m")

    assert str(tmp_path / name) in str(caught.value)
    assert "model 'm'" in str(caught.value)


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")

    with pytest.raises(TokenizerUnavailable, match=r"has no tokenizer\.json"):
        load_huggingface(tmp_path)


def test_a_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{]")

    with pytest.raises(TokenizerUnavailable, match="cannot be loaded"):
        load_huggingface(tmp_path)


def test_a_template_that_does_not_parse_is_refused_at_load(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "broken", "{% for message in %}", small=True)

    with pytest.raises(TokenizerUnavailable, match="chat template"):
        load_huggingface(folder)


def test_a_bare_file_counts_text_and_has_no_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(small_tokenizer_json(), encoding="utf-8")

    tokenizer = load_huggingface(file)

    assert tokenizer.count("hello", add_special_tokens=True) == 5
    assert not tokenizer.is_chat_exact
    assert tokenizer.overhead is None


def test_a_model_that_the_engine_renders_in_its_own_code_is_not_called_exact(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "own", small=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["GptOssForCausalLM"]}))

    assert not load_huggingface(folder).is_chat_exact


def test_a_processors_own_template_is_used_where_there_are_no_tools(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "vision", small=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))

    tokenizer = load_huggingface(folder)

    assert tokenizer.render(ChatPrompt([USER])) == "hi!"
    assert "<|user|>" in tokenizer.render(ChatPrompt([USER], tools=[{"type": "function", "function": {"name": "f"}}]))


def test_truncation_left_in_a_tokenizer_file_is_switched_off(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "short", small=True)
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    description["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")

    assert load_huggingface(folder).count("one two three " * 20, add_special_tokens=False) > 8


def test_a_missing_encoding_is_named_with_its_file_and_source(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnavailable, match="put it into that folder") as caught:
        load_tiktoken("o200k_base", tmp_path)

    assert "o200k_base.tiktoken" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_damaged_encoding_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cl100k_base.tiktoken").write_text("IQ== 0\n")

    with pytest.raises(TokenizerUnavailable, match="SHA-256"):
        load_tiktoken("cl100k_base", tmp_path)


@pytest.mark.parametrize(("encoding", "message"), [("nonesuch", "o200k_base"), ("gpt2", "r50k_base")])
def test_an_encoding_that_cannot_be_had_is_refused(tmp_path: Path, encoding: str, message: str) -> None:
    with pytest.raises(TokenizerUnavailable, match=message):
        load_tiktoken(encoding, tmp_path)


@pytest.mark.parametrize(
    "config",
    [_config(), _config(kind="tiktoken", encoding="o200k_base"), _config(kind="tiktoken", path=Path("/"))],
)
def test_a_setting_that_is_missing_is_named(config: TokenizerConfig) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"tokenizer\.(path|encoding) is not set"):
        build_counter(config, model="m")


def test_special_tokens_in_a_text_count_one_each_with_tiktoken() -> None:
    tokenizer = TiktokenTokenizer(_tiny_encoding())

    assert tokenizer.count("ab<|endoftext|>ab", add_special_tokens=True) == 5
    assert tokenizer.limits.longest_token_bytes == len("<|endoftext|>")


def test_a_tiktoken_chat_is_laid_out_but_never_exact() -> None:
    tokenizer = TiktokenTokenizer(_tiny_encoding())
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    text = tokenizer.render(ChatPrompt(messages, tools=[{"type": "function", "function": {"name": "tool_name"}}]))

    assert "tool_name" in text
    assert "user: hi" in text
    assert not tokenizer.is_chat_exact
    assert tokenizer.overhead is not None
