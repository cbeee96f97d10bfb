"""Chat bodies of many kinds, as plain data, for comparing the router's count with an engine's.

Every body is one that a stock vLLM takes for a text model (where tools are given, `tool_choice` is `none`, which
needs no tool parser and leaves the tools in the prompt). `model`, `max_tokens` and the like are for the caller to add.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from router.request import ChatPrompt

Body = dict[str, Any]

_WORDS = tuple(
    word
    for line in (
        "the of a to in is you that it he was for on are as with his they I at be this have from or one had by word",
        "but not what all were we when your can said there use an each which she do how their if will up other about",
        "out many then them these so some her would make like him into time has look two more write go see number no",
        "way could people my than first water been call who oil its now find long down day did get come made may part",
    )
    for word in line.split()
)
_SCRIPTS = (
    "Съешь же ещё этих мягких французских булок",
    "人人生而自由,在尊严和权利上一律平等。",
    "すべての人間は、生まれながらにして自由であり",
    "모든 인간은 태어날 때부터 자유로우며",
    "يولد جميع الناس أحراراً متساوين",
    "सभी मनुष्यों को गौरव और अधिकारों",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🙂🙃 ẹ́ ﷺ Ⱥ K",
    "e\u0301 n\u0303 \u1e9b\u0323 \u0041\u030a",
    "\u200b\u200d\ufeff\u00a0\u2028 zero width",
)
_CODE = (
    "def f(x: int) -> int:\n    return x * 2  # twice\n",
    "SELECT a, b FROM t WHERE c <= 10 AND d LIKE '%x%';",
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
    "for (int i = 0; i < n; ++i) { a[i] ^= 0xdeadBEEF; }",
    "<div class='x'>&nbsp;</div>\t\t\r\n\r\n",
)
_MARKERS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|assistant|>",
    "</s>",
    "<｜User｜>",
    "{{ bos_token }}{% endfor %}",
)


def varied_chats(seed: int = 7, rounds: int = 9) -> list[Body]:
    """At least 120 bodies, the same for the same seed: `rounds` of every kind in `_KINDS`."""
    rng = random.Random(seed)
    return [kind(rng) for _ in range(rounds) for kind in _KINDS]


def chat_prompt(body: Body) -> ChatPrompt:
    """The prompt in a chat body, as the router's parsing hands it to the counter."""
    kwargs = dict(body.get("chat_template_kwargs") or {})
    kwargs |= {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None}
    return ChatPrompt(
        messages=body["messages"],
        tools=body.get("tools"),
        chat_template=body.get("chat_template"),
        template_kwargs=kwargs,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        add_special_tokens=body.get("add_special_tokens", False),
        bytes_total=len(json.dumps(body)),
    )


def text_of(rng: random.Random, words: int) -> str:
    """Mostly words, sometimes other scripts, code, markers, white space, digits."""
    pieces = []
    for _ in range(words):
        draw = rng.random()
        if draw < 0.85:
            pieces.append(rng.choice(_WORDS))
        elif draw < 0.90:
            pieces.append(rng.choice(_SCRIPTS))
        elif draw < 0.94:
            pieces.append(rng.choice(_CODE))
        elif draw < 0.97:
            pieces.append(str(rng.randrange(10**9)))
        else:
            pieces.append(rng.choice(_MARKERS))
    return rng.choice(["", "", " ", "\n"]) + rng.choice([" ", " ", "  ", "\n"]).join(pieces)


def _said(role: str, rng: random.Random, words: int | None = None) -> Body:
    return {"role": role, "content": text_of(rng, words or rng.randrange(1, 60))}


def _single(rng: random.Random) -> Body:
    return {"messages": [_said("user", rng)]}


def _system(rng: random.Random) -> Body:
    return {"messages": [_said("system", rng), _said("user", rng)]}


def _turns(rng: random.Random) -> Body:
    turns = [_said(role, rng) for _ in range(rng.randrange(1, 6)) for role in ("user", "assistant")]
    return {"messages": [*turns, _said("user", rng)], "n": rng.choice([1, 2])}


def _scripts(rng: random.Random) -> Body:
    return {"messages": [{"role": "user", "content": " ".join(rng.sample(_SCRIPTS, 4))}, _said("user", rng)]}


def _markers(rng: random.Random) -> Body:
    text = f"explain {rng.choice(_MARKERS)} and{rng.choice(_MARKERS)}{rng.choice(_MARKERS)} in this file"
    return {"messages": [{"role": "user", "content": text}]}


def _parts(rng: random.Random) -> Body:
    parts: list[Any] = [{"type": "text", "text": text_of(rng, 12)} for _ in range(rng.randrange(1, 4))]
    return {"messages": [{"role": "system", "content": [parts[0]]}, {"role": "user", "content": parts}]}


def _odd_parts(rng: random.Random) -> Body:
    answer = {"role": "assistant", "content": [{"type": "refusal", "refusal": text_of(rng, 5)}]}
    parts = [{"type": "text", "text": text_of(rng, 4)}, {"type": "text", "text": ""}]
    return {"messages": [_said("user", rng), answer, {"role": "user", "content": parts}]}


def _tool(rng: random.Random, name: str) -> Body:
    properties = {
        rng.choice(_WORDS) + str(place): {"type": rng.choice(["string", "integer"]), "description": text_of(rng, 6)}
        for place in range(rng.randrange(1, 5))
    }
    function: Body = {"name": name, "parameters": {"type": "object", "properties": properties, "required": ["x"]}}
    if rng.random() < 0.7:
        function["description"] = text_of(rng, 15)
    if rng.random() < 0.3:
        function["strict"] = rng.choice([True, False])
    if rng.random() < 0.3:
        function["unknown_field"] = "dropped by the engine"
    tool: Body = {"function": function, "type": "function"}
    return tool if rng.random() < 0.7 else {"type": "function", "function": function, "note": "dropped too"}


def _tools(rng: random.Random) -> Body:
    tools = [_tool(rng, f"tool_{place}") for place in range(rng.randrange(1, 6))]
    return {"messages": [_said("user", rng)], "tools": tools, "tool_choice": "none"}


def _tool_round(rng: random.Random) -> Body:
    arguments = rng.choice(
        ['{"city": "Zürich", "days": [1, 2.50, null]}', "{}", '{"b":1,"a":{"c":"\\u00e9"}}', '["x"]', "not json"]
    )
    calls = [
        {"type": "function", "id": f"call_{place}", "function": {"name": "tool_0", "arguments": arguments}}
        for place in range(rng.randrange(1, 3))
    ]
    result: Any = text_of(rng, 20)
    if rng.random() < 0.5:
        result = [{"type": "text", "text": text_of(rng, 8)}, {"type": "text", "text": "second"}]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
    said = {"role": "assistant", "content": rng.choice([None, "", "let me see"]), "tool_calls": calls}
    messages = [_said("user", rng), said, *answers, _said("user", rng)]
    return {"messages": messages, "tools": [_tool(rng, "tool_0")], "tool_choice": "none"}


def _null_content(rng: random.Random) -> Body:
    calls = [{"id": "call_9", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said: Body = {"role": "assistant", "content": None, "tool_calls": calls}
    if rng.random() < 0.5:
        said.pop("content")
    return {"messages": [_said("user", rng), said, {"role": "tool", "tool_call_id": "call_9", "content": "ok"}]}


def _continued(rng: random.Random) -> Body:
    messages = [_said("user", rng), {"role": "assistant", "content": "Once upon " + text_of(rng, 5).strip()}]
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _no_generation_prompt(rng: random.Random) -> Body:
    return {"messages": [_said("user", rng)], "add_generation_prompt": False}


def _options(rng: random.Random) -> Body:
    options: Body = {"enable_thinking": rng.choice([True, False]), "unheard_of": "x"}
    if rng.random() < 0.5:
        options["style"] = text_of(rng, 3)
    return {"messages": [_said("user", rng)], "chat_template_kwargs": options}


def _reasoning(rng: random.Random) -> Body:
    said = {"role": "assistant", "content": text_of(rng, 5), rng.choice(["reasoning", "reasoning_content"]): "hm, well"}
    body: Body = {"messages": [_said("user", rng), said, _said("user", rng)]}
    if rng.random() < 0.7:
        body["reasoning_effort"] = rng.choice(["low", "high", "none"])
    return body


def _documents(rng: random.Random) -> Body:
    documents = [{"title": text_of(rng, 2), "text": text_of(rng, 20)} for _ in range(2)]
    return {"messages": [_said("user", rng)], "documents": documents}


def _names_and_special_tokens(rng: random.Random) -> Body:
    messages = [{"role": "user", "name": rng.choice(["ann", "Bob Ö"]), "content": text_of(rng, 9)}]
    return {"messages": messages, "add_special_tokens": rng.choice([True, False])}


def _developer(rng: random.Random) -> Body:
    first = _said("system", rng, 5) if rng.random() < 0.5 else _said("developer", rng, 5)
    return {"messages": [first, _said("developer", rng, 7), _said("user", rng)]}


def _long(rng: random.Random) -> Body:
    return {"messages": [_said("system", rng), _said("user", rng, rng.randrange(300, 900))]}


_KINDS: tuple[Callable[[random.Random], Body], ...] = (
    _single,
    _system,
    _turns,
    _scripts,
    _markers,
    _parts,
    _odd_parts,
    _tools,
    _tool_round,
    _null_content,
    _continued,
    _no_generation_prompt,
    _options,
    _reasoning,
    _documents,
    _names_and_special_tokens,
    _developer,
    _long,
)
