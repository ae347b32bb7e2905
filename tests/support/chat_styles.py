"""Chat templates in the styles of well-known model families, each beside a plain Python function that says which of its
text the assistant writes. The functions are the oracle of `tests/data/test_chat_properties.py`: their text must be
what stock `apply_chat_template` renders, and their marks are what has to be supervised.
"""

import dataclasses
import json
from collections.abc import Callable

Segments = list[tuple[str, bool]]
"""(text, whether the assistant writes it), in order."""

BOS = "<s>"
EOS = "</s>"
DATE = "28 Nov 2026"


@dataclasses.dataclass(frozen=True)
class Style:
    """A template and its oracle."""

    template: str
    segments: Callable[[list[dict], list[dict] | None], Segments]
    specials: tuple[str, ...]
    """Tokens of the style's own, beside `BOS` and `EOS`."""
    system: bool = True
    tools: bool = False
    reasoning: bool = False
    alternates: bool = False
    """Whether user and assistant have to take turns, the user first."""


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


# Llama 3: headers, contents without blanks around them, one tool call a turn, today's date in the system turn.

_LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- if tools %}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{%- endif %}
{{- system }}{{- '<|eot_id|>' }}
{%- for turn in turns %}
    {%- if turn.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (turn.content | tojson) + '<|eot_id|>' }}
    {%- elif turn.tool_calls %}
        {%- if turn.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
        {%- set call = turn.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + turn.role + '<|end_header_id|>\n\n' + (turn.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""


def _llama3(messages, tools):
    system, turns = "", messages
    if messages[0]["role"] == "system":
        system, turns = messages[0]["content"].strip(), messages[1:]
    described = "".join(_json(tool) + "\n" for tool in tools or ())
    out = [
        (
            f"{BOS}<|start_header_id|>system<|end_header_id|>\n\nToday: {DATE}\n\n{described}{system}<|eot_id|>",
            False,
        )
    ]
    for turn in turns:
        role = "ipython" if turn["role"] == "tool" else turn["role"]
        out.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
        said = turn["content"].strip()
        if turn["role"] == "tool":
            said = _json(turn["content"])
        elif turn.get("tool_calls"):
            call = turn["tool_calls"][0]["function"]
            said = f'{{"name": "{call["name"]}", "parameters": {_json(call["arguments"])}}}'
        out.append((said + "<|eot_id|>", turn["role"] == "assistant"))
    return out


# ChatML as Qwen 3 writes it: reasoning is kept after the last question only, results of tools are a user's turn.

_QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set reasoning = m.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.question and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.index > 1 or content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def _qwen(messages, tools):
    out: Segments = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        described = "".join(_json(tool) + "\n" for tool in tools)
        head = "" if system is None else system + "\n\n"
        out.append((f"<|im_start|>system\n{head}{described}<|im_end|>\n", False))
    elif system is not None:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    question = max((index for index, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for index, m in enumerate(messages):
        last = index == len(messages) - 1
        if m["role"] == "user":
            out.append((f"<|im_start|>user\n{m['content']}<|im_end|>\n", False))
        elif m["role"] == "assistant":
            content, reasoning = m["content"], m.get("reasoning_content", "")
            held = bool(reasoning)
            if not reasoning and "</think>" in content:
                reasoning = content.split("</think>")[0].split("<think>")[-1].strip("\n")
                content = content.split("</think>")[-1].lstrip("\n")
                held = bool(reasoning)
            out.append(("<|im_start|>assistant\n", False))
            calls = [
                f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
                f"{_json(call['function']['arguments'])}}}\n</tool_call>"
                for call in m.get("tool_calls") or ()
            ]
            said = "\n".join([*([content] if content else []), *calls])
            if index > question and (last or held):
                block = f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n"
                said = "\n".join([*([content.lstrip("\n")] if content else []), *calls])
                # Without reasoning the block is the template's own, where the turn is nothing but its content.
                out.append((block, held))
            out += [(said + "<|im_end|>", True), ("\n", False)]
        elif m["role"] == "tool":
            before = "" if index and messages[index - 1]["role"] == "tool" else "<|im_start|>user"
            after = "" if not last and messages[index + 1]["role"] == "tool" else "<|im_end|>\n"
            out.append((f"{before}\n<tool_response>\n{m['content']}\n</tool_response>{after}", False))
    return out


# Gemma: no system turn, the assistant is called model, contents without blanks around them.

_GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""


def _gemma(messages, _tools):
    out: Segments = [(BOS, False)]
    for m in messages:
        answer = m["role"] == "assistant"
        out += [
            (f"<start_of_turn>{'model' if answer else m['role']}\n", False),
            (f"{m['content'].strip()}<end_of_turn>", answer),
            ("\n", False),
        ]
    return out


# Mistral: the system text and the tools stand in the last question, so a prefix is rendered otherwise than the whole.

_MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set turns = messages %}
{%- endif %}
{%- set last = namespace(question=-1, asks=true) %}
{%- for m in turns %}
    {%- if m.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != last.asks %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set last.asks = not last.asks %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == last.question %}
            {{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\n\n' if system and loop.index0 == last.question else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' }}{{- {'content': m.content} | tojson }}{{- '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- else %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def _mistral(messages, tools):
    system, turns = "", messages
    if messages[0]["role"] == "system":
        system, turns = messages[0]["content"], messages[1:]
    question = max(index for index, m in enumerate(turns) if m["role"] == "user")
    out: Segments = [(BOS, False)]
    for index, m in enumerate(turns):
        if m["role"] == "user":
            described = f"[AVAILABLE_TOOLS]{_json(tools)}[/AVAILABLE_TOOLS]" if tools and index == question else ""
            head = system + "\n\n" if system and index == question else ""
            out.append((f"{described}[INST]{head}{m['content']}[/INST]", False))
        elif m["role"] == "tool":
            out.append((f"[TOOL_RESULTS]{_json({'content': m['content']})}[/TOOL_RESULTS]", False))
        elif m.get("tool_calls"):
            calls = [call["function"] for call in m["tool_calls"]]
            said = ", ".join(_json({"name": call["name"], "arguments": call["arguments"]}) for call in calls)
            out.append((f"[TOOL_CALLS][{said}]{EOS}", True))
        else:
            out += [(" ", False), (m["content"].strip() + EOS, True)]
    return out


# Harmony, of gpt-oss: messages in channels; the last answer ends with another token than those before it.

_HARMONY = """{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if messages[0].role in ('system', 'developer') or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role in ('system', 'developer') %}{{- '# Instructions\n\n' + messages[0].content }}{%- endif %}
    {%- if tools %}{{- '# Tools\n\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(call='', final=-1) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.tool_calls %}{%- set last.final = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {%- if m.thinking and loop.index0 > last.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
        {%- set last.call = call.name %}
    {%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson }}{{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


def _harmony(messages, tools):
    out: Segments = [("<|start|>system<|message|>Current date: 2026-11-28<|end|>", False)]
    first = messages[0]["role"] in ("system", "developer")
    if first or tools:
        text = f"# Instructions\n\n{messages[0]['content']}" if first else ""
        text += "# Tools\n\n" + "".join(_json(tool) for tool in tools) if tools else ""
        out.append((f"<|start|>developer<|message|>{text}<|end|>", False))
    finals = [index for index, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
    call = ""
    for index, m in enumerate(messages):
        last = index == len(messages) - 1
        if m["role"] == "user":
            out.append((f"<|start|>user<|message|>{m['content']}<|end|>", False))
        elif m["role"] == "assistant":
            thinking = m.get("reasoning_content", "")
            if m.get("tool_calls"):
                thinking = thinking if index > max(finals, default=-1) else ""
                function = m["tool_calls"][0]["function"]
                call = function["name"]
                header = f" to=functions.{call}<|channel|>commentary json<|message|>"
                said, end = _json(function["arguments"]), "<|call|>"
            else:
                thinking = thinking if last else ""
                header, said, end = "<|channel|>final<|message|>", m["content"], "<|return|>" if last else "<|end|>"
            out.append(("<|start|>assistant", False))
            if thinking:
                out.append((f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant", True))
            # What precedes a content alone is the template's; beside more than a content it is the model's.
            out += [(header, bool(thinking or m.get("tool_calls"))), (said + end, True)]
        elif m["role"] == "tool":
            text = _json(m["content"])
            out.append((f"<|start|>functions.{call} to=assistant<|channel|>commentary<|message|>{text}<|end|>", False))
    return out


# One that leaves out earlier questions' politeness: what it writes of a turn depends on whether another one follows.

_REWRITES = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'user' and not loop.last and loop.index0 + 2 < messages | length %}
        {{- '(earlier) ' + m.content | trim }}
    {%- elif m.role == 'assistant' and loop.last %}
        {{- '(answer ' ~ loop.index ~ ' of ' ~ messages | length ~ ')\n' + m.content }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def _rewrites(messages, _tools):
    out: Segments = []
    for index, m in enumerate(messages):
        last = index == len(messages) - 1
        out.append((f"<|im_start|>{m['role']}\n", False))
        if m["role"] == "user" and index + 2 < len(messages):
            out.append((f"(earlier) {m['content'].strip()}<|im_end|>", False))
        else:
            if m["role"] == "assistant" and last:
                out.append((f"(answer {index + 1} of {len(messages)})\n", False))
            out.append((m["content"] + "<|im_end|>", m["role"] == "assistant"))
        out.append(("\n", False))
    return out


# One that marks what the assistant says, all but the end of the turn.

_MARKS = """{%- for tool in tools or [] %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}
            {{- m.content }}
            {%- for call in m.tool_calls or [] %}
                {{- '<tool_call>' + call.function.name }}{{- call.function.arguments | tojson }}{{- '</tool_call>' }}
            {%- endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def _marks(messages, tools):
    out: Segments = [("".join(_json(tool) + "\n" for tool in tools or ()), False)]
    for m in messages:
        said = m["content"]
        if m.get("reasoning_content"):
            said = f"<think>\n{m['reasoning_content']}\n</think>\n\n{said}"
        for call in m.get("tool_calls") or ():
            said += f"<tool_call>{call['function']['name']}{_json(call['function']['arguments'])}</tool_call>"
        out += [(f"<|im_start|>{m['role']}\n", False), (said + "<|im_end|>", m["role"] == "assistant"), ("\n", False)]
    return out


STYLES = {
    "llama3": Style(_LLAMA3, _llama3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), tools=True),
    "qwen": Style(_QWEN, _qwen, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), tools=True, reasoning=True),
    "gemma": Style(_GEMMA, _gemma, ("<start_of_turn>", "<end_of_turn>"), system=False, alternates=True),
    "mistral": Style(_MISTRAL, _mistral, ("[INST]", "[/INST]", "[TOOL_CALLS]"), tools=True, alternates=True),
    "harmony": Style(
        _HARMONY,
        _harmony,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        tools=True,
        reasoning=True,
    ),
    "marks": Style(_MARKS, _marks, ("<|im_start|>", "<|im_end|>"), tools=True, reasoning=True),
    "rewrites": Style(_REWRITES, _rewrites, ("<|im_start|>", "<|im_end|>")),
}
