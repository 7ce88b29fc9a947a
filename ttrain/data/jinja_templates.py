"""The chat templates of ttrain as Jinja, with their roles and special tokens."""

import string

from ttrain.data.tools import CALL_BEGIN, CALL_END, TOOLS_BEGIN, TOOLS_END, TOOLS_SENTENCE

ROLES = ("system", "user", "assistant", "tool")

PAD, UNK, BOS, EOS, END, IM_END = (
    "<|pad|>",
    "<|unk|>",
    "<|bos|>",
    "<|eos|>",
    "<|end|>",
    "<|im_end|>",
)

ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)


# Special tokens of a trained tokenizer, in the order of their ids, and the one that ends an answer.
SPECIAL_TOKENS = {
    "ttrain": (PAD, UNK, BOS, EOS, *ROLE_TOKENS, END),
    "tinyseek": (PAD, UNK, BOS, EOS, IM_END),
}

END_TOKENS = {"ttrain": END, "tinyseek": IM_END}


# What transformers renders. `turn.text` is built as in `ttrain.data.tools`: the functions on the
# first turn, the calls after the words of the assistant.
_JINJA = """\
$begin
{%- set functions = namespace(text='') -%}
{%- if tools -%}
{%- set functions.text = '$sentence\\n$tools_begin' -%}
{%- for tool in tools -%}{%- set functions.text = functions.text ~ '\\n' ~ (tool | tojson) -%}{%- endfor -%}
{%- set functions.text = functions.text ~ '\\n$tools_end' -%}
{%- if not messages or messages[0]['role'] != 'system' -%}
{%- set messages = [{'role': 'system', 'content': ''}] + messages -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role not in $roles -%}{{- raise_exception('unknown role ' ~ role) -}}{%- endif -%}
{%- set turn = namespace(text=message['content'] or '') -%}
{%- if loop.first and functions.text -%}
{%- set turn.text = turn.text ~ ('\\n\\n' if turn.text else '') ~ functions.text -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{%- set arguments = function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -%}
{%- set written = '{"name": ' ~ (function['name'] | tojson) ~ ', "arguments": ' ~ arguments ~ '}' -%}
{%- set turn.text = turn.text ~ ('\\n' if turn.text else '') ~ '$call_begin\\n' ~ written ~ '\\n$call_end' -%}
{%- endfor -%}
{{- $header -}}
{%- if role == 'assistant' and turn.text | trim -%}
{%- generation -%}{{- turn.text ~ '$answer_end' -}}{%- endgeneration -%}
{%- else -%}
{{- turn.text ~ ($turn_end) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{%- set role = 'assistant' -%}{{- $header -}}{%- endif -%}
"""

_TOOLS = {
    "sentence": TOOLS_SENTENCE,
    "tools_begin": TOOLS_BEGIN,
    "tools_end": TOOLS_END,
    "call_begin": CALL_BEGIN,
    "call_end": CALL_END,
    "roles": str(list(ROLES)),
}

_PARTS = {
    "ttrain": {
        "begin": "{{- bos_token -}}",
        "header": "'<|' ~ role ~ '|>'",
        "answer_end": END,
        "turn_end": f"'{END}'",
    },
    "tinyseek": {
        "begin": "",
        "header": "role | capitalize ~ '：'",
        "answer_end": IM_END,
        "turn_end": f"'{IM_END}' if role == 'assistant' else '\\n'",
    },
}

JINJA = {
    name: string.Template(_JINJA).substitute(_TOOLS, **parts).lstrip()
    for name, parts in _PARTS.items()
}
