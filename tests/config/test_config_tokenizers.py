"""A tokenizer that is not here, or not whole, is found at start; nothing is fetched."""

import hashlib

import pytest

from router.config.tokenizer_rules import ENCODINGS, VocabularyFile

VOCABULARY = b"IQ== 0\n"
FILE = VocabularyFile("https://vocabularies.example/x.tiktoken", hashlib.sha256(VOCABULARY).hexdigest())


@pytest.fixture
def tokenizer(folder):
    """The problems of the valid configuration with a tokenizer section, as message and fix."""

    def problems(section):
        return [str(problem) for problem in folder.problems(with_tokenizer(folder, section))]

    return problems


def with_tokenizer(folder, section):
    return folder.edited({"    aliases: [small]": f"    tokenizer: {section}"})


@pytest.fixture
def cache(folder, monkeypatch):
    """A folder with one whole vocabulary in it, which is that of cl100k_base for the time of the test."""
    monkeypatch.setitem(ENCODINGS, "cl100k_base", (FILE,))
    path = folder.path / "cache"
    path.mkdir()
    (path / FILE.cache_name).write_bytes(VOCABULARY)
    return path


def test_a_missing_folder_is_told_with_the_way_to_supply_it(tokenizer):
    (problem,) = tokenizer("{kind: huggingface, path: nowhere}")

    assert "models[0].tokenizer.path: nowhere: there is no such folder or file" in problem
    assert "hf download" in problem


@pytest.mark.parametrize("present", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_one_of_its_files_names_the_file(folder, tokenizer, present):
    (folder.path / "tok").mkdir()
    (folder.path / "tok" / present).write_text("{}")
    missing = {"tokenizer.json": "tokenizer_config.json", "tokenizer_config.json": "tokenizer.json"}[present]

    (problem,) = tokenizer("{kind: huggingface, path: tok}")

    assert f"the folder has no {missing}" in problem


def test_a_tokenizer_file_alone_will_do(folder):
    (folder.path / "tokenizer.json").write_text("{}")

    config = folder.load(with_tokenizer(folder, "{kind: huggingface, path: tokenizer.json}"))

    assert config.models["llama"].tokenizer.path == folder.path / "tokenizer.json"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": ', "version https://git-lfs.example/spec/v1\noid sha256:0\n"])
def test_a_damaged_tokenizer_file_is_refused(folder, tokenizer, content):
    (folder.path / "tokenizer.json").write_text(content)

    (problem,) = tokenizer("{kind: huggingface, path: tokenizer.json}")

    assert "tokenizer.json is not a tokenizer file in JSON" in problem


def test_a_whole_vocabulary_in_the_cache_is_taken(folder, cache):
    config = folder.load(with_tokenizer(folder, "{kind: tiktoken, encoding: cl100k_base, path: cache}"))

    tokenizer = config.models["llama"].tokenizer
    assert (tokenizer.path, tokenizer.encoding) == (cache, "cl100k_base")


def test_without_a_path_the_environments_cache_is_used(folder, cache):
    folder.environ = {"TIKTOKEN_CACHE_DIR": str(cache)}

    config = folder.load(with_tokenizer(folder, "{kind: tiktoken, encoding: cl100k_base}"))

    assert config.models["llama"].tokenizer.path == cache


def test_a_missing_vocabulary_names_its_source_and_the_name_it_must_have(cache, tokenizer):
    (cache / FILE.cache_name).unlink()

    (problem,) = tokenizer("{kind: tiktoken, encoding: cl100k_base, path: cache}")

    assert FILE.url in problem
    assert FILE.cache_name in problem


def test_a_damaged_vocabulary_is_refused_before_tiktoken_deletes_it(cache, tokenizer):
    (cache / FILE.cache_name).write_bytes(VOCABULARY + b"!")

    (problem,) = tokenizer("{kind: tiktoken, encoding: cl100k_base, path: cache}")

    assert "the cached file for cl100k_base is damaged" in problem
    assert (cache / FILE.cache_name).exists()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{kind: huggingface}", "kind huggingface needs a path"),
        ("{kind: tiktoken}", "kind tiktoken needs an encoding"),
        ("{kind: tiktoken, encoding: cl100k}", "is no encoding of tiktoken"),
        ("{kind: tiktoken, encoding: cl100k_base}", "needs the folder of its cache"),
        ("{kind: estimate, path: x}", "is not used by kind estimate"),
        ("{kind: estimate, encoding: cl100k_base}", "is for kind tiktoken only"),
        ("{kind: huggingface, path: ~/tok}", "~ is not replaced"),
    ],
)
def test_settings_that_do_not_go_with_the_kind_are_refused(tokenizer, section, said):
    assert any(said in problem for problem in tokenizer(section))


def test_a_missing_package_is_named_before_the_first_chat_needs_it(folder, tokenizer, monkeypatch):
    import importlib.util

    (folder.path / "tokenizer.json").write_text("{}")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else find_spec(name))

    (problem,) = tokenizer("{kind: huggingface, path: tokenizer.json}")

    assert "needs the package jinja2. Run `pip install jinja2`." in problem


def test_the_table_of_vocabularies_is_that_of_the_installed_tiktoken(monkeypatch):
    import tiktoken_ext.openai_public as openai_public

    asked: list[tuple[str, str]] = []

    def load_one(url, expected_hash):
        asked.append((url, expected_hash))
        return {}

    def load_two(vocab_bpe_file, encoder_json_file, vocab_bpe_hash, encoder_json_hash):
        asked.extend([(vocab_bpe_file, vocab_bpe_hash), (encoder_json_file, encoder_json_hash)])
        return {}

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", load_one)
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", load_two)
    table = {}
    for name, construct in openai_public.ENCODING_CONSTRUCTORS.items():
        asked.clear()
        construct()
        table[name] = tuple(VocabularyFile(url, sha256) for url, sha256 in asked)

    assert table == ENCODINGS
