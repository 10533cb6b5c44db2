"""Small chat templates that write turns, calls and results in the manner of published ones."""

from __future__ import annotations

BEGIN, END = "<|im_start|>", "<|im_end|>"
HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = f"{{% for m in messages %}}{HEAD}{{{{ m.content + '<|im_end|>\n' }}}}{{% endfor %}}{PROMPT}"
BODY = "{{ m.content + '<|im_end|>' }}"
MARKED = (
    f"{{% for m in messages %}}{HEAD}{{% if m.role == 'assistant' %}}{{%- generation -%}}{BODY}"
    f"{{%- endgeneration -%}}{{% else %}}{BODY}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}{PROMPT}"
)
QWEN = """{%- for m in messages %}
    {%- if m.role == "assistant" and m.tool_calls %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{- '\n' + m.content }}{% endif %}
        {%- for tool_call in m.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}{%- for m in messages %}
    {%- set head = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if m.content is mapping or m.content is iterable %}
            {{- m.content | tojson }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}{{ raise_exception('one call') }}{% endif %}
        {%- set tool_call = m.tool_calls[0].function %}
        {{- head }}{{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|im_end|>' }}
    {%- else %}
        {{- head + m['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in m.tool_calls %}{{- tool_call.function | tojson }}{% endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('role') }}{% endif %}
{%- endfor %}"""
GLM = """[gMASK]<sop>{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls is defined %}
        {%- for tool_call in m.tool_calls %}
            {{- '<|assistant|>' + tool_call.function.name + '\n' }}
            {{- tool_call.function.arguments | tojson }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}
    {%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
GEMMA = """{{- bos_token }}{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""
# Arguments are texts, as DeepSeek's templates want them.
DEEPSEEK = QWEN.replace("tool_call.arguments | tojson", "tool_call.arguments")
