"""Every mistake is refused with its place and the way out."""

import hashlib

import pytest

from router.config.load import Overrides, load
from router.config.problems import ConfigErrors

KEYED = "\nkeys:\n  - {name: k, key: abc}\n"


@pytest.mark.parametrize(
    ("old", "new", "where", "near"),
    [
        ("server: {port", "sever: {}\nserver: {port", "sever", "server"),
        ("{port: 8080}", "{prot: 8080}", "server.prot", "server.port"),
        (
            "    url: http://127.0.0.1:8002",
            "    url: http://127.0.0.1:8002\n    capacity_token: 5",
            "engines[1].capacity_token",
            "engines[1].capacity_tokens",
        ),
        ("    aliases: [small]", "    alias: [small]", "models[0].alias", "models[0].aliases"),
        (
            "    aliases: [small]",
            "    tokenizer: {knd: estimate}",
            "models[0].tokenizer.knd",
            "models[0].tokenizer.kind",
        ),
        ("      batch:", "      bath: {}\n      batch:", "models[0].pools.bath", "models[0].pools.batch"),
        (
            "max_model_len: 4096",
            "max_model_length: 4096",
            "models[0].pools.chat.max_model_length",
            "models[0].pools.chat.max_model_len",
        ),
        (
            "max_num_seqs: 2\n",
            "max_num_seqs: 2\n        timeouts: {connect: 3}\n",
            "models[0].pools.batch.timeouts.connect",
            "models[0].pools.batch.timeouts.connect_s",
        ),
        ("server: {port", "redis: {ulr: x}\nserver: {port", "redis.ulr", "redis.url"),
        (
            "server: {port",
            "relays: [{name: r, url: 'http://h', models: {llama: x}, clases: [chat]}]\nserver: {port",
            "relays[0].clases",
            "relays[0].classes",
        ),
        ("server: {port", "keys: [{name: r, key: x, tennant: y}]\nserver: {port", "keys[0].tennant", "keys[0].tenant"),
    ],
)
def test_a_misspelt_key_is_named_in_full_with_the_nearest_known_one(folder, old, new, where, near):
    problem = folder.problem(folder.edited({old: new}))

    assert problem.where == where
    assert f"Did you mean {near}?" in problem.fix


@pytest.mark.parametrize(
    ("old", "new", "where", "belongs"),
    [
        ("{port: 8080}", "{port: 8080, max_num_seqs: 3}", "server.max_num_seqs", "models[0].pools.chat"),
        ("    aliases: [small]", "    prefill_lanes: 2", "models[0].prefill_lanes", "models[0].pools.batch"),
        (
            "max_num_seqs: 16",
            "max_num_seqs: 16\n        queue_max_requests: 3",
            "models[0].pools.chat.queue_max_requests",
            "models[0].pools.batch",
        ),
        (
            "max_num_seqs: 16",
            "max_num_seqs: 16\n        threshold_tokens: 3",
            "models[0].pools.chat.threshold_tokens",
            "models[0]",
        ),
        ("    aliases: [small]", "    engines: [short]", "models[0].engines", "models[0].pools.chat"),
        ("    aliases: [small]", "    workers: 3", "models[0].workers", "server"),
        ("server: {port", "first_byte_s: 3\nserver: {port", "first_byte_s", "models[0].pools.chat.timeouts"),
    ],
)
def test_a_right_key_at_the_wrong_level_is_told_where_it_belongs(folder, old, new, where, belongs):
    problem = folder.problem(folder.edited({old: new}))

    assert problem.where == where
    assert "belongs in" in problem.fix
    assert belongs in problem.fix


def test_a_duplicate_key_names_both_lines(edit):
    problem = edit({"max_num_seqs: 16": "max_num_seqs: 16\n        max_num_seqs: 17"})

    assert (problem.line, problem.where) == (15, "models[0].pools.chat.max_num_seqs")
    assert "already set on line 14" in problem.message


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        ("max_model_len: 4096", "max_model_len: 4k", "Write 4096."),
        ("max_model_len: 4096", "max_model_len: '4096'", "Write 4096."),
        ("max_model_len: 4096", "max_model_len: 4_096", "Write 4096."),
        ("max_model_len: 4096", "max_model_len: 4096.0", "Write 4096."),
        ("max_num_seqs: 16", "max_num_seqs: 16\n        ttft_target_s: 500ms", "Write 0.5."),
        ("max_num_seqs: 16", "max_num_seqs: 16\n        ttft_target_s: 2m", "Write 120."),
        ("max_num_seqs: 16", "max_num_seqs: 16\n        kv_share_ratio: 60%", "Write 0.6."),
        ("{port: 8080}", "{body_max_bytes: 64MiB}", "Write 67108864."),
        ("{port: 8080}", "{port: 0o17}", "Write the number alone, without quotes or a unit."),
        ("{port: 8080}", "{port: true}", "Write the number alone, without quotes or a unit."),
        ("    aliases: [small]", "    borrow: yes", "Write true."),
        ("    aliases: [small]", "    borrow: 1", "Write true or false."),
        ("    aliases: [small]", "    aliases: [7]", "Write one text, in quotes if it looks like a number."),
        ("    aliases: [small]", "    aliases: small", "Write a list (lines that begin with -) under it."),
        ("    aliases: [small]", "    tokenizer: estimate", "Write a mapping (lines of key: value) under it."),
        ("    aliases: [small]", "    tokenizer: {kind: bpe}", "Write 'huggingface', 'tiktoken' or 'estimate'."),
        (
            "    aliases: [small]",
            "    aliases: ['a b']",
            "A model's name has printable characters only, without spaces and braces.",
        ),
        ("{port: 8080}", "{port: 70000}", "It must be at most 65535."),
        (
            "max_num_seqs: 16",
            "max_num_seqs: 16\n        kv_share_ratio: 0",
            "It must be above 0 (a ratio lies between 0 and 1).",
        ),
        (
            "max_num_seqs: 16",
            "max_num_seqs: 16\n        kv_share_ratio: 1.5",
            "It must be at most 1 (a ratio lies between 0 and 1).",
        ),
        ("    aliases: [small]", "    aliases:", "Give aliases a value, or remove it."),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_with_what_to_write(edit, old, new, fix):
    assert edit({old: new}).fix == fix


def test_a_value_is_shown_as_it_was_written(edit):
    assert edit({"port: 8080": "port: '8k'"}).value == "'8k'"


def test_a_missing_setting_names_itself_and_its_place(edit):
    problem = edit({"    url: http://127.0.0.1:8002\n": ""})

    assert (problem.where, problem.line) == ("engines[1].url", 5)
    assert problem.fix == "Add url to engines[1]."


@pytest.mark.parametrize("reference", ["${NOT_SET}", "'${NOT_SET}'", "http://${NOT_SET}:8001", "$${X}${NOT_SET}"])
def test_a_variable_that_is_not_set_is_refused_by_name(edit, reference):
    problem = edit({"http://127.0.0.1:8001": reference})

    assert problem.where == "engines[0].url"
    assert "the environment variable NOT_SET is not set" in problem.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${}", "not the name of a variable"),
        ("${A", "not the name of a variable"),
        ("${A:-x}", "not the name of a variable"),
        ("$NAME", "only ${NAME} is"),
        ("${EMPTY}", "set but empty"),
        ("${NESTED}", "which is not expanded"),
    ],
)
def test_no_literal_reference_survives(folder, text, said):
    folder.environ = {"A": "a", "EMPTY": " ", "NESTED": "${A}"}

    problem = folder.problem(folder.edited({"aliases: [small]": f"aliases: ['{text}']"}))

    assert said in problem.message


def test_variables_are_expanded_wherever_a_text_stands_and_can_be_escaped(folder):
    folder.environ = {"NAME": "llama", "HOST": "h", "LEN": "4096", "YES": "true", "NUMBER": "123"}
    relay = "{name: r, url: 'http://r', api_key: 'a$${b}', models: {'${NAME}-${NUMBER}': x}}"
    changes = {
        "name: llama": "name: ${NAME}-${NUMBER}",
        "http://127.0.0.1:8001": "http://${HOST}:1",
        "max_model_len: 4096": "max_model_len: ${LEN}",
        "    aliases: [small]": "    aliases: ['${NUMBER}']\n    borrow: ${YES}",
        "server: {port": f"relays: [{relay}]\nserver: {{port",
    }

    config = folder.load(folder.edited(changes))

    model = config.models["llama-123"]
    assert (model.aliases, model.borrow) == (("123",), True)
    assert model.chat is not None
    assert model.chat.max_model_len == 4096
    assert config.engines["short"].url == "http://h:1"
    assert config.relays[0].api_key is not None
    assert config.relays[0].api_key.reveal() == "a${b}"
    assert dict(config.relays[0].models) == {"llama-123": "x"}


def test_a_variable_with_no_number_in_it_is_refused_without_showing_it(folder):
    folder.environ = {"PORT": "8k"}

    problem = folder.problem(folder.edited({"port: 8080": "port: '${PORT}'"}))

    assert problem.value == "'${PORT}'"
    assert problem.fix == "Set the variable to a number alone, without a unit."


@pytest.mark.parametrize(
    "other", ["http://127.0.0.1:8001", "http://localhost:8001/", "http://127.0.0.1:8001/v1", "http://[::1]:8001"]
)
def test_two_engines_with_one_address_are_refused(edit, other):
    problem = edit({"http://127.0.0.1:8002": f'"{other}"'})

    assert problem.where == "engines[1].url"
    assert problem.message == "engine short has this address already"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8001", "has no scheme"),
        ("localhost:8001", "has no scheme"),
        ("ftp://h", "has a scheme that engines and relays do not speak"),
        ("http://", "has no valid host and port"),
        ("http://h:99999", "is not a URL"),
        ("http://h:0", "has no valid host and port"),
        ("http://h?x=1", "has a query or a fragment"),
        ("http://a b", "has characters that cannot stand in a URL"),
        ("http://u:p@h", "has credentials in it"),
        ("http://[::1", "is not a URL"),
        ("unix://sock", "has no path of a socket"),
    ],
)
def test_a_url_that_cannot_be_called_is_refused(edit, url, message):
    assert edit({"http://127.0.0.1:8001": f'"{url}"'}).message == message


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1/", "http://h:1"),
        ("https://h/v1", "https://h"),
        ("http://h/api/v1/", "http://h/api"),
        ("http://[::1]:1", "http://[::1]:1"),
        ("unix:///run/vllm.sock", "unix:///run/vllm.sock"),
    ],
)
def test_a_url_is_kept_without_the_part_that_every_request_path_begins_with(folder, url, base):
    config = folder.load(folder.edited({"http://127.0.0.1:8001": f'"{url}"'}))

    assert config.engines["short"].url == base


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        (
            {"engines: [short]": "engines: [shrt]", "engines: [long]": "engines: [long, short]"},
            "models[0].pools.chat.engines[0]",
            "is not defined under engines. Did you mean short?",
        ),
        ({"engines: [long]": "engines: [short]"}, "engines[1].name", "is in no pool"),
        ({"engines: [short]": "engines: [short, short]"}, "models[0].pools.chat.engines[1]", "is in this pool already"),
        (
            {"name: long": "name: short", "engines: [long]": "engines: [short]"},
            "engines[1].name",
            "engines[0] has this name already",
        ),
        ({"[small]": "[small, llama]"}, "models[0].aliases[1]", "models[0].name is this name already"),
        ({"[small]": "[small, small]"}, "models[0].aliases[1]", "models[0].aliases[0] is this name already"),
        (
            {"    aliases: [small]": "    threshold_tokens: 4097"},
            "models[0].threshold_tokens",
            "is above the chat pool's max_model_len (4096 tokens)",
        ),
        (
            {"max_model_len: 4096": "max_model_len: 40000"},
            "models[0].pools.chat.max_model_len",
            "is above the batch pool's max_model_len (32768 tokens)",
        ),
        (
            {"max_num_seqs: 16": "max_num_seqs: 16\n        default_output_tokens: 4096"},
            "models[0].pools.chat.default_output_tokens",
            "leaves no room for a prompt",
        ),
        (
            {"max_num_seqs: 2": "max_num_seqs: 2\n        queue_max_tokens: 100"},
            "models[0].pools.batch.queue_max_tokens",
            "the longest request could never wait",
        ),
        (
            {"    url: http://127.0.0.1:8002": "    url: http://127.0.0.1:8002\n    max_num_seqs: 1"},
            "models[0].pools.batch.max_num_seqs",
            "is above the 1 sequences of engine long",
        ),
        (
            {"{port: 8080}": "{body_max_bytes: 2000, buffered_max_bytes: 1999}"},
            "server.body_max_bytes",
            "is above buffered_max_bytes",
        ),
        (
            {"http://127.0.0.1:8001": "http://localhost:8080"},
            "engines[0].url",
            "is the address on which the router itself listens",
        ),
        ({"{port: 8080}": "{host: '127.0.0.1:80'}"}, "server.host", "is neither a name nor an address"),
        ({"{port: 8080}": "{data_dir: ~/d}"}, "server.data_dir", "~ is not replaced"),
        ({"{port: 8080}": "{data_dir: pools.yaml}"}, "server.data_dir", "is a file"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(edit, changes, where, said):
    problem = edit(changes)

    assert problem.where == where
    assert said in str(problem)


def test_an_engine_serves_one_model(folder, valid):
    problem = folder.problem(
        valid + "  - {name: other, pools: {chat: {engines: [short], max_model_len: 9, max_num_seqs: 1}}}\n"
    )

    assert (problem.where, problem.message) == ("models[1].pools.chat.engines[0]", "serves model llama already")


def test_a_model_needs_a_pool(folder, valid):
    problem = folder.problem(valid + "  - {name: other, pools: {}}\n")

    assert problem.message == "has neither a chat nor a batch pool"


@pytest.mark.parametrize(
    ("relay", "where", "said"),
    [
        ("url: 'http://localhost:8080/v1', models: {llama: x}", "relays[0].url", "the router itself listens"),
        ("url: 'http://[::1]:8080', models: {llama: x}", "relays[0].url", "the router itself listens"),
        ("url: 'http://h', models: {lama: x}", "relays[0].models.lama", "Known: llama."),
        ("url: 'http://h', models: {small: x}", "relays[0].models.small", "Write the model's name, llama."),
        ("url: 'http://h', models: {}", "relays[0].models", "is empty"),
        ("url: 'http://h', models: {llama: 'a b'}", "relays[0].models.llama", "cannot be used"),
        ("url: 'http://h', models: {'a b': x}", "relays[0].models.a b", "cannot be used"),
        ("url: 'http://h', models: {llama: x}, classes: []", "relays[0].classes", "is empty"),
        ("url: 'http://h', models: {llama: x}, proxy: 'socks5://h:1'", "relays[0].proxy", "is not a proxy's URL"),
    ],
)
def test_a_relay_that_loops_or_knows_no_model_is_refused(folder, valid, relay, where, said):
    problem = folder.problem(valid + f"relays:\n  - {{name: r, {relay}}}\n")

    assert problem.where == where
    assert said in str(problem)


def test_a_router_that_listens_everywhere_is_reached_over_loopback_too(folder, valid):
    text = valid + "relays: [{name: r, url: 'http://127.0.0.1:8080', models: {llama: x}}]" + KEYED

    problem = folder.problem(text, Overrides(host="0.0.0.0"))

    assert problem.where == "relays[0].url"


@pytest.mark.parametrize("url", ["mysql://h", "redis://", "localhost:6379", "redis+sentinel://h:1"])
def test_an_unknown_redis_url_is_refused(edit, url):
    assert edit({"server: {port": f"redis: {{url: '{url}'}}\nserver: {{port"}).where == "redis.url"


@pytest.mark.parametrize(
    "url", ["redis://u:p@h/1", "rediss://h", "unix:///run/r.sock", "redis+cluster://h,h2:7000", "embedded"]
)
def test_the_known_redis_urls_are_taken(folder, url):
    config = folder.load(folder.edited({"server: {port": f"redis: {{url: '{url}'}}\nserver: {{port"}))

    assert config.redis.url.reveal() == url


@pytest.mark.parametrize(
    ("entry", "where", "said"),
    [
        ("{name: a, key: ''}", "keys[0].key", "cannot be used"),
        ("{name: a, key: }", "keys[0].key", "has no value"),
        ("{name: a, key: ~}", "keys[0].key", "has no value"),
        ("{name: a, key: '${EMPTY}'}", "keys[0].key", "EMPTY is set but empty"),
        ("{name: a, key: '${NOT_SET}'}", "keys[0].key", "NOT_SET is not set"),
        ("{name: a, key: 'a b'}", "keys[0].key", "without spaces"),
        ("{name: a}", "keys[0]", "has no key"),
        ("{name: a, key: x, key_sha256: '" + "0" * 64 + "'}", "keys[0]", "has both"),
        ("{name: a, key_sha256: abc}", "keys[0].key_sha256", "64 hexadecimal digits"),
        ("{name: a, key_sha256: " + hashlib.sha256(b"").hexdigest() + "}", "keys[0].key_sha256", "an empty key"),
        ("{name: a, key: x, default_class: fast}", "keys[0].default_class", "'chat' or 'batch'"),
        ("{name: a, key: x, may_set: [admin]}", "keys[0].may_set[0]", "not one of the possible values"),
        ("{name: a, key: x}, {name: a, key: y}", "keys[1].name", "keys[0] has this name already"),
        ("{name: a, key: x}, {name: b, key: x}", "keys[1].key", "is the same key as that of keys[0]"),
        (
            "{name: a, key: x}, {name: b, key_sha256: " + hashlib.sha256(b"x").hexdigest() + "}",
            "keys[1].key_sha256",
            "is the same key",
        ),
        (
            "{name: a, tenant: t, key: x}, {name: b, key: y, tenant: t, weight: 2}",
            "keys[1].weight",
            "has weight 1 in keys[0]",
        ),
    ],
)
def test_a_key_that_is_empty_doubtful_or_there_twice_is_refused(folder, valid, entry, where, said):
    folder.environ = {"EMPTY": ""}

    problem = folder.problem(valid + f"keys: [{entry}]\n")

    assert problem.where == where
    assert said in str(problem)


def test_a_section_of_keys_with_nothing_in_it_does_not_open_the_door(folder, valid):
    problem = folder.problem(valid + "keys:\n  # - {name: a, key: x}\n")

    assert (problem.where, problem.message) == ("keys", "has no value")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "router.example"])
def test_without_keys_the_router_listens_on_loopback_only(folder, valid, host):
    problem = folder.problem(valid, Overrides(host=host))
    config = folder.load(valid + KEYED, Overrides(host=host))

    assert problem.fix == "Add a key under keys, or set host to 127.0.0.1."
    assert config.server.host == host


@pytest.mark.parametrize(("lanes", "largest", "tightest"), [(1, 1, "prefill_lanes"), (3, 2, "max_num_seqs")])
def test_workers_that_cannot_split_a_pool_are_told_the_largest_number_that_works(folder, lanes, largest, tightest):
    text = folder.edited({"max_num_seqs: 2": f"max_num_seqs: 2\n        prefill_lanes: {lanes}"})

    problem = folder.problem(text, Overrides(workers=4))

    assert problem.where == "--workers"
    assert f"The largest number that works is {largest}" in problem.fix
    assert f"models[0].pools.batch.{tightest}" in problem.message


def test_all_mistakes_are_told_at_once_and_none_follows_from_another(folder):
    problems = folder.problems(
        """\
        server: {prt: 8080, workers: 3}
        engines:
          - {name: a, url: 'h:1'}
          - {nam: b, url: 'http://h:2'}
        models:
          - name: m
            threshold_tokens: 8k
            pools:
              chat: {engines: [a, b], max_model_len: 4k, max_num_seqs: 4}
              batch: {engines: [a, b], max_model_len: 100, max_num_seqs: 2, prefill_lanes: 2}
        keys:
          - {name: k, key: '${NOT_SET}'}
          - {name: k, key: x}
        """
    )

    assert [(problem.line, problem.where) for problem in problems] == [
        (1, "server.prt"),
        (1, "server.workers"),
        (3, "engines[0].url"),
        (4, "engines[1].nam"),
        (7, "models[0].threshold_tokens"),
        (9, "models[0].pools.chat.max_model_len"),
        (12, "keys[0].key"),
        (13, "keys[1].name"),
    ]


def test_the_exception_reads_like_a_compilers_output(folder, valid):
    folder.write(valid.replace("8080", "8k"))

    with pytest.raises(ConfigErrors) as caught:
        load(folder.file, environ={})

    line = f"{folder.file}:1: server.port: 8k: is not a whole number. Write 8192."
    assert str(caught.value) == line
