"""Small chat templates, each with one peculiarity of published ones."""

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
)
GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    f"{_TURNS}{{% endif %}}<{{{{ m.role }}}}>{{{{ m.content | trim }}}}\n{{% endfor %}}<model>"
)
GEMMA_3 = (
    "{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    f"{_TURNS}{{% endif %}}<{{{{ m.role }}}}>{{{{ first if loop.first }}}}{{{{ m.content | trim }}}}\n{{% endfor %}}"
    "<model>"
)
# Messages with calls, and results, do not count as turns; text beside a call is dropped; the system text is in the last
# message, if that is the user's.
MISTRAL = (
    "{% set system = '' %}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}"
    "{% endif %}{% endfor %}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ system if loop.last }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)
USER_PARTS = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content[0]['text'] }}\n"
    "{% else %}<{{ m.role }}>{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
# It has no branch for system messages, or for any role but these two.
PHI_3 = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}\n"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}\n{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}\n{% endif %}"
    "{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}{{ ns.system }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
QWEN_3_5 = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
)
TOOLS = f"{{% if tools %}}<tools>{{{{ tools | tojson }}}}\n{{% endif %}}{CALLS}"
NEEDS_TOOLS = f"{{% for t in tools %}}<tool>{{{{ t | tojson }}}}{{% endfor %}}{CALLS}"
# Tools are in the first turn of the user; a message has one call, and no text beside it.
LLAMA_3 = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}{% if not messages %}{{ raise_exception('no first user message') }}{% endif %}"
    "<user>{{ tools | tojson }}{{ messages[0].content }}\n{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"
    "<call>{{ m.tool_calls[0].function | tojson }}\n{% else %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
)
SEES_CALLS_ONLY = CALLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
KNOWN_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls and "
    "messages[loop.index0 - 1].role != 'tool' %}{{ raise_exception('no call') }}{% endif %}{% endfor %}" + TOOLS
)
NO_EMPTY = (
    "{% for m in messages %}{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    "{% endfor %}" + TOOLS
)
USER_LAST = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('Ask first.') }}{% endif %}" + EACH
ALL = {name: value for name, value in list(globals().items()) if name.isupper() and not name.startswith("_")}
