"""What of the client's body reaches the engine: every byte, unless a field must change."""

import json
from typing import Any

import pytest

from tests.http.setting import MODEL, chat_body
from tests.http.stack import Stack, fresh

ODD_BODY = (
    b'{ "messages":[{"role":"user","content":"caf\\u00e9 \xe6\xa8\xa1"}],\n "model" : "llama", "max_tokens":3,'
    b'"guided_json":{"type":"object"},"chat_template_kwargs":{"x":1.50},"made_up":[1e2,null, true] }'
)


def sent(body: bytes) -> Any:
    return json.loads(body)


async def test_a_body_in_which_nothing_must_change_reaches_the_engine_byte_for_byte(stack: Stack) -> None:
    answer = await stack.post("/v1/chat/completions", ODD_BODY)

    assert answer.status_code == 200
    assert stack.sent_for(answer).body == ODD_BODY


async def test_of_a_body_that_names_an_alias_only_the_model_changes(stack: Stack) -> None:
    body = ODD_BODY.replace(b'"llama"', b'"small"')

    answer = await stack.post("/v1/chat/completions", body)

    forwarded = stack.sent_for(answer).body
    assert sent(forwarded) == {**sent(body), "model": MODEL}
    assert b'"caf\\u00e9 \xe6\xa8\xa1"' in forwarded
    assert b'{"x":1.50}' in forwarded
    assert b"[1e2,null, true]" in forwarded


@pytest.mark.parametrize("field", ["priority", "kv_transfer_params"])
async def test_a_field_that_the_key_may_not_set_is_taken_out_and_nothing_else(stack: Stack, field: str) -> None:
    body = {**chat_body(max_tokens=3, top_k=5), field: {"a": 1} if field == "kv_transfer_params" else -5}

    answer = await stack.post("/v1/chat/completions", body)

    del body[field]
    assert sent(stack.sent_for(answer).body) == body
    assert stack.sent_for(answer).priority == 0


@pytest.mark.parametrize("spelling", [b'"priority"', b'"\\u0070riority"'])
async def test_a_guarded_field_is_found_however_its_name_is_spelt_and_however_often(
    stack: Stack, spelling: bytes
) -> None:
    body = (
        b'{"priority":null,"model":"llama","max_tokens":2,"messages":[{"role":"user","content":"x"}],%b:-9}' % spelling
    )

    answer = await stack.post("/v1/chat/completions", body)

    assert answer.status_code == 200
    assert "priority" not in sent(stack.sent_for(answer).body)


async def test_headers_that_the_key_may_not_set_do_not_reach_the_engine(stack: Stack) -> None:
    answer = await stack.chat(
        max_tokens=2, headers={"X-Vllm-Priority": "-9", "X-data-parallel-rank": "1", "X-Team": "blue"}
    )

    headers = stack.sent_for(answer).headers
    assert {"x-vllm-priority", "x-data-parallel-rank"}.isdisjoint(headers)
    assert headers["x-team"] == "blue"


async def test_a_key_that_may_set_guarded_fields_and_headers_has_them_forwarded() -> None:
    allowed = ["class", "priority", "kv_transfer_params", "data_parallel_rank"]
    keys = [{"name": "trusted", "key": "trusted-key", "may_set": allowed}, {"name": "plain", "key": "plain-key"}]
    body = chat_body(max_tokens=2, priority=-3, kv_transfer_params={"a": 1})
    guarded = {"X-Vllm-Priority": "-9", "X-data-parallel-rank": "1"}

    async with fresh(keys=keys) as stack:
        trusted = await stack.post(
            "/v1/chat/completions", body, headers={"authorization": "Bearer trusted-key", **guarded}
        )
        plain = await stack.post("/v1/chat/completions", body, headers={"authorization": "Bearer plain-key", **guarded})

        assert sent(stack.sent_for(trusted).body) == body
        assert stack.sent_for(trusted).headers["x-vllm-priority"] == "-9"
        assert stack.sent_for(trusted).headers["x-data-parallel-rank"] == "1"
        assert sent(stack.sent_for(plain).body) == chat_body(max_tokens=2)
        assert "x-vllm-priority" not in stack.sent_for(plain).headers
        assert "authorization" not in stack.sent_for(trusted).headers
