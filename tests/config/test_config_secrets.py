"""No secret is ever shown: every test plants one marker and looks for it wherever a configuration can surface."""

import json
import traceback

import pytest

from router.config.keys import KeyRing
from router.config.load import load
from router.config.problems import ConfigErrors
from router.config.reading import read_document
from router.config.validate import validate

MARKER = "MARKER-6f1c"

EVERYWHERE = f"""\
redis: {{url: "redis://u:{MARKER}@h:6379/0"}}
engines:
  - {{name: a, url: "http://h:1", api_key: {MARKER}}}
models:
  - {{name: m, pools: {{chat: {{engines: [a], max_model_len: 4096, max_num_seqs: 2}}}}}}
relays:
  - {{name: r, url: "http://r", models: {{m: x}}, api_key: "{MARKER}", proxy: "http://u:{MARKER}@p:1"}}
keys:
  - {{name: k, key: {MARKER}}}
"""


def test_a_loaded_configuration_shows_none_of_its_secrets(folder):
    config = folder.load(EVERYWHERE)

    shown = [repr(config), str(config), f"{config.keys}", repr(KeyRing(config.keys)), repr(config.redis.url)]
    assert not any(MARKER in text for text in shown)
    assert config.relays[0].proxy is not None
    assert MARKER in config.relays[0].proxy.reveal()


def test_the_schemas_own_values_show_no_secret_either(folder):
    folder.write(EVERYWHERE)

    file = validate(read_document(folder.file, {}))

    assert file is not None
    assert MARKER not in repr(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_num_seqs: 2", "max_num_seqs: two"),
        (f'"redis://u:{MARKER}@h:6379/0"', f"mysql://u:{MARKER}@h"),
        (f'"redis://u:{MARKER}@h:6379/0"', f"redis:u:{MARKER}@h"),
        (f'"redis://u:{MARKER}@h:6379/0"', f"redis://h?password={MARKER}"),
        (f'"redis://u:{MARKER}@h:6379/0"', f"redis://u:{MARKER}#x@h"),
        (f"api_key: {MARKER}", f"api_kye: {MARKER}"),
        (f"api_key: {MARKER}", f"apikey: {MARKER}"),
        (f"api_key: {MARKER}", f"api_key: '{MARKER} {MARKER}'"),
        (f"api_key: {MARKER}", f"api_key: [{MARKER}]"),
        (f"api_key: {MARKER}", f"api_key: *{MARKER}"),
        (f"api_key: {MARKER}", f"api_key: !{MARKER} x"),
        (f"api_key: {MARKER}", f"api_key: !{MARKER}!x y"),
        (f"api_key: {MARKER}", f"api_key: '{MARKER}"),
        (f"api_key: {MARKER}", f"api_key: {MARKER}, api_key: {MARKER}2"),
        (f"api_key: {MARKER}", f"api_key: ${{A}}{MARKER}"),
        (f"api_key: {MARKER}", f"password: {MARKER}"),
        ('url: "http://h:1"', f"url: '{MARKER} //h:1'"),
        ('url: "http://h:1"', f'url: "http://u:{MARKER}@h:1"'),
        ('url: "http://h:1"', f'url: "http://h:1?token={MARKER}"'),
        ('url: "http://h:1"', f'url: "u:{MARKER}@h:1"'),
        (f'proxy: "http://u:{MARKER}@p:1"', f"proxy: 'socks5://u:{MARKER}@p:1'"),
        (f"{{name: k, key: {MARKER}}}", f"{{name: k, key_sha256: {MARKER}}}"),
        (f"{{name: k, key: {MARKER}}}", f"{{name: k, key: {MARKER}}}, {{name: k, key: {MARKER}}}"),
        (f"{{name: k, key: {MARKER}}}", f"key:{MARKER}"),
        (f"{{name: k, key: {MARKER}}}", f"{MARKER}"),
        ("redis: {", f"api_key: {MARKER}\nredis: {{"),
        ("redis: {", f"server: {{key: {MARKER}}}\nredis: {{"),
    ],
)
def test_a_mistake_beside_a_secret_does_not_show_it(folder, old, new):
    assert EVERYWHERE.count(old) == 1
    text = EVERYWHERE.replace(old, new)
    folder.write(text.replace("}, {name: k", "}\n  - {name: k"))

    with pytest.raises(ConfigErrors) as caught:
        load(folder.file, environ={})

    problems = caught.value.problems
    told = [*map(str, problems), *map(repr, problems), json.dumps([problem.as_json() for problem in problems])]
    told += [repr(caught.value), "".join(traceback.format_exception(caught.value, chain=True))]
    assert not any(MARKER in text for text in told), told


@pytest.mark.parametrize(
    "place", ["port: '${SECRET}'", "log_level: '${SECRET}'", "host: 'x/${SECRET}'", "workers: '${SECRET}'"]
)
def test_what_a_variable_holds_is_not_shown_even_where_it_does_not_belong(folder, valid, place):
    folder.environ = {"SECRET": MARKER}

    problems = folder.problems(valid.replace("port: 8080", place))

    assert not any(MARKER in str(problem) for problem in problems)
    assert "${SECRET}" in str(problems[0])
