"""What a valid file turns into."""

from pathlib import Path

import pytest

from router.config.load import Overrides
from router.policy.demand import RequestClass


def test_a_short_file_gets_every_default(folder, valid):
    config = folder.load(valid)

    model = config.models["llama"]
    assert (config.server.host, config.server.workers, config.server.body_max_bytes) == ("127.0.0.1", 1, 32 * 2**20)
    assert config.redis.is_embedded
    assert (model.served_model_name, model.threshold_tokens, model.tokenizer.kind) == ("llama", 4096, "estimate")
    assert (model.borrow, model.retry_started, model.cap_unset_max_tokens, model.attempts_max) == (
        True,
        False,
        False,
        3,
    )
    assert model.commit_after_s == 30.0
    assert model.chat is not None
    assert model.batch is not None
    assert (model.chat.hold_ratio, model.chat.prefill_lanes, model.chat.timeouts.first_byte_s) == (0.25, None, 120.0)
    assert (model.batch.prefill_lanes, model.batch.timeouts.first_byte_s, model.batch.timeouts.idle_s) == (
        1,
        3600.0,
        120.0,
    )
    assert model.pools == (model.chat, model.batch)
    assert config.keys == ()


def test_every_setting_of_the_file_arrives(folder):
    folder.environ = {"KEY": "sk-1", "PORT": "9000"}

    config = folder.load(
        """\
        server: {host: 0.0.0.0, port: '${PORT}', workers: 2, shutdown_grace_s: 3, log_level: debug}
        redis: {url: "redis+sentinel://h:26379,h2:26379/main/1", key_prefix: r, socket_timeout_s: 1}
        engines:
          - {name: one, url: "https://engine.example/v1/", api_key: "${KEY}", capacity_tokens: 70000, max_num_seqs: 32}
        models:
          - name: llama
            aliases: [a, b]
            served_model_name: /models/llama
            threshold_tokens: 2000
            tokenizer: {image_tokens: 7, exact: always, timeout_s: 2}
            pools:
              chat: {engines: [one], max_model_len: 8192, max_num_seqs: 28, default_output_tokens: 5, prefill_lanes: 8}
              batch: {engines: [one], max_model_len: 8192, max_num_seqs: 4, prefill_lanes: 2, timeouts: {idle_s: 9}}
        relays:
          - {name: out, url: "https://relay.example/api/v1", models: {llama: vendor/x}, classes: [chat, batch]}
        keys:
          - {name: web, key: "${KEY}", tenant: t, weight: 2, default_class: batch, may_set: [class, priority],
             admin: true}
        """
    )

    model, relay, key = config.models["llama"], config.relays[0], config.keys[0]
    assert (config.server.port, config.server.shutdown_grace_s) == (9000, 3.0)
    assert config.redis.url.reveal().startswith("redis+sentinel://")
    assert config.engines["one"].url == "https://engine.example"
    assert config.engines["one"].api_key is not None
    assert config.engines["one"].api_key.reveal() == "sk-1"
    assert (model.aliases, model.served_model_name, model.threshold_tokens) == (("a", "b"), "/models/llama", 2000)
    assert model.chat is not None
    assert (model.chat.default_output_tokens, model.chat.prefill_lanes) == (5, 8)
    assert model.batch is not None
    assert (model.batch.timeouts.idle_s, model.batch.timeouts.first_byte_s) == (9.0, 3600.0)
    assert (relay.url, dict(relay.models)) == ("https://relay.example/api", {"llama": "vendor/x"})
    assert relay.classes == {RequestClass.CHAT, RequestClass.BATCH}
    assert (key.tenant, key.weight, key.default_class, key.admin) == ("t", 2.0, RequestClass.BATCH, True)
    assert key.may_set == {"class", "priority"}


@pytest.mark.parametrize(("chat_engines", "ratio"), [("short, long", 0.6), ("short", 1.0)])
def test_batch_takes_less_of_an_engine_that_it_shares_with_chat(folder, chat_engines, ratio):
    config = folder.load(folder.edited({"engines: [short]": f"engines: [{chat_engines}]"}))

    batch = config.models["llama"].batch
    assert batch is not None
    assert batch.kv_share_ratio == ratio


def test_a_short_context_keeps_half_of_itself_for_the_prompt(folder):
    config = folder.load(folder.edited({"max_model_len: 4096": "max_model_len: 128"}))

    chat = config.models["llama"].chat
    assert chat is not None
    assert chat.default_output_tokens == 64


def test_a_model_may_have_a_batch_pool_only(folder):
    config = folder.load(
        """\
        engines: [{name: a, url: "http://h:1"}]
        models: [{name: m, pools: {batch: {engines: [a], max_model_len: 9000, max_num_seqs: 2}}}]
        """
    )

    assert config.models["m"].chat is None
    assert config.models["m"].threshold_tokens == 9000


def test_relative_paths_begin_at_the_files_folder(folder):
    (folder.path / "tok").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder.path / "tok" / name).write_text("{}")

    text = folder.edited(
        {"aliases: [small]": "tokenizer: {kind: huggingface, path: tok}", "{port: 8080}": "{data_dir: d}"}
    )
    config = folder.load(text)

    assert config.server.data_dir == folder.path / "d"
    assert config.models["llama"].tokenizer.path == folder.path / "tok"
    assert not (folder.path / "d").exists()


def test_options_of_the_command_line_win_and_are_checked_like_the_file(folder, valid, monkeypatch):
    monkeypatch.chdir(folder.path)
    (folder.path / "here").mkdir()
    monkeypatch.chdir(folder.path / "here")

    config = folder.load(valid, Overrides(host="::1", port=9001, workers=1, data_dir=Path("d")))
    problems = folder.problems(valid, Overrides(host="0.0.0.0", port=-1))

    assert (config.server.host, config.server.port, config.server.data_dir) == ("::1", 9001, folder.path / "here" / "d")
    assert {(problem.where, problem.value) for problem in problems} == {("--host", "0.0.0.0"), ("--port", "-1")}


def test_the_example_at_the_root_loads_without_an_environment():
    root = Path(__file__).parents[2]
    text = (root / "pools.yaml").read_text()

    from router.config.load import load

    config = load(root / "pools.yaml", environ={})

    model = config.models["my-model"]
    assert model.chat is not None
    assert model.batch is not None
    assert (model.chat.max_model_len, model.chat.max_num_seqs) == (4096, 16)
    assert (model.batch.max_model_len, model.batch.max_num_seqs) == (32768, 2)
    assert [engine.url for engine in config.engines.values()] == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    for shown in ("kind: huggingface", "# relays:", "# keys:", "engines: [only]"):
        assert shown in text


@pytest.mark.parametrize("part", ["two lanes", "relays", "keys"])
def test_the_examples_commented_parts_load_as_well(folder, part):
    lines = (Path(__file__).parents[2] / "pools.yaml").read_text().splitlines()
    starts = {"two lanes": "# engines:", "relays": "# relays:", "keys": "# keys:"}
    start = lines.index(starts[part])
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("#")), len(lines))
    block = "\n".join(line.removeprefix("# ") for line in lines[start:end])
    live = "\n".join(line for line in lines if not line.startswith("#"))
    folder.environ = {"PROVIDER_API_KEY": "p", "ROUTER_WEB_KEY": "w"}

    config = folder.load(block if part == "two lanes" else live + "\n" + block)

    assert config.models["my-model"].chat is not None
    assert len(config.relays) == (part == "relays")
    assert len(config.keys) == (2 if part == "keys" else 0)
