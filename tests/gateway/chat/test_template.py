"""Chat templates find what transformers gives them, and render as there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.chat.template import make_answer

MESSAGES = [
    {"role": "system", "content": "  Be <brief> & 'kind'.\n"},
    {"role": "user", "content": "héllo {{ 1 }} 你好"},
    {"role": "assistant", "content": "Hi.\n\n"},
    {"role": "user", "content": "Bye"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "turns": """
{{- bos_token }}
{% for message in messages %}
    {% if message['role'] == 'user' %}
        [INST] {{ message['content'] | trim }} [/INST]
    {%- else %}
        {{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
""",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.role }};{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% set seen = 'outer' %}{% for m in messages %}\n"
    "{% generation %}\n{% set seen = m.role %}{{ seen }}\n{% endgeneration %}\n{% endfor %}"
    "{{ seen }}",
    "namespace": "{% set ns = namespace(self=1, last='') %}{% for m in messages %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.last }}{{ ns.self }}",
    "json": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "dicts": "{{ dict(a=1, b=[2]) | tojson }}{{ dict.fromkeys(['x'], 3) | tojson }}"
    "{{ dict([('k', 'v')]).k }}",
    "none of these": "{{ tools is defined }}{{ tools is none }}{{ documents is none }}"
    "{{ unknown is defined }}",
    "undefined is empty": "[{{ messages[0].name }}]",
    "this year": "{{ strftime_now('%Y') }}",
    "slices": "{% for m in messages[1:] %}{{ loop.index0 }}{{ m.role[0] | upper }}{% endfor %}",
    "macros": "{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{{ turn(messages[0]) }}"
    "{{ raise_exception is callable }}",
}
REFUSED = {
    "its own error": "{{ raise_exception('roles must alternate') }}",
    "underscores": "{{ ''.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a namespace's underscores": "{{ namespace(__class__=1) }}",
    "a namespace's underscores, set": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changing what it is given": "{{ messages.append(1) }}",
    "attributes of dict": "{{ dict.__subclasses__() }}",
    "unknown tags": "{% nonsense %}",
    "undefined attributes": "{{ unknown.attribute }}",
}


def rendered(template: str) -> Any:
    """What the renderer process answers, its start and the question having been JSON."""
    start = json.loads(json.dumps({"template": template, "special_tokens": SPECIAL}))
    question = {
        "messages": [{"role": m["role"], "num_chars": len(m["content"])} for m in MESSAGES],
        "text": "".join(m["content"] for m in MESSAGES),
    }
    return make_answer(start)(json.loads(json.dumps(question)))


def as_transformers_does(template: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    expected = as_transformers_does(TEMPLATES[name])
    assert expected.strip()
    assert rendered(TEMPLATES[name]) == {"text": expected}


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_refuses_is_refused_with_the_same_kind_of_error(name: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any: it names what is expected
        as_transformers_does(REFUSED[name])
    assert rendered(REFUSED[name])["error"].startswith(f"{type(caught.value).__name__}: ")
