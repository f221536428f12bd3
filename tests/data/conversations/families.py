"""Chat templates in the manner of known families, small, each with its special tokens and the tokens that end its answers."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.helpers import PAD, tiny_tokenizer


@dataclass(frozen=True)
class Family:
    """A template with its special tokens; `ends` as `generation_config.eos_token_id` names them."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = tiny_tokenizer(self.template, eos=PAD)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [t for t in (*self.special, *self.ends) if t != PAD]}
        )
        return tokenizer

    def eos_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        ids: Any = tokenizer.convert_tokens_to_ids(list(self.ends))
        return sorted(ids)


_PROMPT = "{% if add_generation_prompt %}"
_CALLS = "{% for c in m.tool_calls or [] %}"

# The next role's marker ends an answer; a result is read by the role "observation".
GLM4 = Family(
    "[gMASK]{% for t in tools or [] %}<|system|>\n{{ t.function | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.tool_calls %}"
    + _CALLS
    + "<|assistant|>{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    + _PROMPT
    + "<|assistant|>{% endif %}",
    ("<|system|>", "<|assistant|>"),
    (PAD, "<|user|>", "<|observation|>"),
)
# The same, with thoughts that earlier turns lose.
GLM45 = Family(
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{% if loop.index0 > ns.last and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}</think>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}" + _PROMPT + "<|assistant|>{% endif %}",
    ("<|system|>", "<|assistant|>"),
    (PAD, "<|user|>", "<|observation|>"),
)
# As GLM's, but the text of a last turn is closed by an end of text, which the target does not write there.
CLOSED = Family(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    + _PROMPT
    + "<|assistant|>{% else %}"
    + PAD
    + "{% endif %}",
    ("<|assistant|>", "<|system|>"),
    ("<|user|>",),
)
QWEN25 = Family(
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}" + _CALLS + "{{ '\n<tool_call>\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}" + _PROMPT + "<|im_start|>assistant\n{% endif %}",
    (),
    ("<|im_end|>", PAD),
)
# The system prompt and the tools stand by the last question: the first only where nothing follows it.
MISTRAL = Family(
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}{% else %}"
    "{% set turns = messages %}{% endif %}{% set asked = turns | selectattr('role', 'equalto', 'user') | list %}<s>"
    "{% for m in turns %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] ["
    + _CALLS
    + "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "{{ c.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}",
    (
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    ("</s>",),
)
# A call is written only where the content is none; the prompt opens a thought, which the template drops.
DEEPSEEK_R1 = Family(
    "<s>{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'tool' %}<Out>{{ m.content }}</Out>"
    "{% elif m.content is none %}<Bot><Calls>"
    + _CALLS
    + "{{ c.function.name }}\n{{ c.function.arguments }}{% endfor %}</s>"
    "{% elif m.role == 'assistant' %}<Bot>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    + _PROMPT
    + "<Bot><think>\n{% endif %}",
    ("<User>", "<Bot>", "<Calls>", "<Out>", "</Out>"),
    ("</s>",),
)
# The same before the prompt opened it.
DEEPSEEK_R1_CLOSED = replace(DEEPSEEK_R1, template=DEEPSEEK_R1.template.replace("<Bot><think>\n{%", "<Bot>{%"))
# The prompt opens a thought or closes it at once; the template writes answers as if there had been none.
DEEPSEEK_V31 = Family(
    "<s>{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% else %}<Bot></think>"
    "{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    + _PROMPT
    + "<Bot>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    ("<User>", "<Bot>"),
    ("</s>",),
)
# The same, begun in the prompt and closed in the answer.
DEEPSEEK_V32 = replace(
    DEEPSEEK_V31,
    template=DEEPSEEK_V31.template.replace("{% else %}</think>{% endif %}", "{% else %}<think></think>{% endif %}"),
)
# Thinking is off: the prompt closes a block of its own, which the template does not write before an answer.
QWEN3 = Family(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    + _PROMPT
    + "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}",
    (),
    ("<|im_end|>", PAD),
)
GEMMA4 = Family(
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
    + _PROMPT
    + "{{ '<|turn>assistant\n<|channel>thought\n<channel|>' }}{% endif %}",
    ("<|turn>", "<|channel>", "<channel|>"),
    ("<turn|>",),
)
# A call stands behind the end of its turn.
GIGACHAT = Family(
    "{% for m in messages %}{{ m.role }}<|role_sep|>{{ m.content or '' }}<|message_sep|>"
    + _CALLS
    + "function call<|role_sep|>{{ c.function | tojson }}<|message_sep|>{% endfor %}{% endfor %}"
    + _PROMPT
    + "assistant<|role_sep|>{% endif %}",
    ("<|role_sep|>",),
    ("<|message_sep|>",),
)
LLAMA31 = Family(
    "<s>{% for m in messages %}{% if m.role == 'tool' %}<|start|>ipython\n\n{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    '<|start|>assistant\n\n{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% if tools %}<|eom_id|>{% else %}<|eot_id|>'
    "{% endif %}{% else %}<|start|>{{ m.role }}\n\n{% if m.role == 'user' and loop.first %}{{ tools | tojson }}{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}" + _PROMPT + "<|start|>assistant\n\n{% endif %}",
    ("<|start|>",),
    (PAD, "<|eom_id|>", "<|eot_id|>"),
)
# One call a turn; answers of earlier turns end otherwise, and lose their thoughts.
HARMONY = Family(
    "{% for t in tools or [] %}<|start|>developer<|message|>type {{ t.function.name }}<|end|>{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + _PROMPT
    + "<|start|>assistant{% endif %}",
    ("<|start|>", "<|channel|>", "<|message|>"),
    (PAD, "<|return|>", "<|call|>"),
)
# An end of text closes every text, after the end of the turn.
PHI4 = Family(
    "{% for m in messages %}{% if m.role == 'system' and tools %}<|system|>{{ m.content }}<|tool|>{{ tools | tojson }}<|/tool|><|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + _PROMPT
    + "<|assistant|>{% else %}"
    + PAD
    + "{% endif %}",
    ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>"),
    (PAD, "<|end|>"),
)
# A call goes by its id, functions.NAME:NUMBER.
KIMI = Family(
    "{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    + _CALLS
    + "<|call|>{{ c.id }}<|argument|>{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    + _PROMPT
    + "<|im_assistant|>{% endif %}",
    ("<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_system|>", "<|call|>", "<|argument|>"),
    ("<|im_end|>",),
)
COMMAND_R = Family(
    "<s>{% for m in messages %}<|turn|>{% if m.role == 'assistant' %}<|bot|>{% if m.tool_calls %}Action: ```json\n["
    + _CALLS
    + '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}]```{% else %}{{ m.content }}'
    "{% endif %}{% elif m.role == 'tool' %}<|sys|><results>\n{{ m.content }}</results>{% else %}<|usr|>{{ m.content }}{% endif %}<|end_turn|>"
    "{% endfor %}" + _PROMPT + "<|turn|><|bot|>{% endif %}",
    ("<|turn|>", "<|bot|>", "<|sys|>", "<|usr|>"),
    ("<|end_turn|>",),
)
# Knows neither calls nor results.
NO_TOOLS = Family(
    "{% for m in messages %}{% if m.role != 'tool' %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endif %}{% endfor %}"
    + _PROMPT
    + "<start_of_turn>assistant\n{% endif %}",
    (),
    (PAD, "<end_of_turn>"),
)
# Writes answers that follow each other as one.
MERGED = Family(
    "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}<|{{ m.role }}|>{% endif %}{{ m.content }}"
    "{% if loop.last or loop.nextitem.role != m.role %}<|end|>{% else %} {% endif %}{% endfor %}"
    + _PROMPT
    + "<|assistant|>{% endif %}",
    ("<|user|>", "<|assistant|>"),
    ("<|end|>",),
)
# As Qwen's, but with the names of arguments alone, and with the calls of the last question alone.
NAMES = replace(QWEN25, template=QWEN25.template.replace("arguments | tojson", "arguments | list | tojson"))
STEPS = replace(
    QWEN25,
    template="{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + QWEN25.template.replace("in m.tool_calls or []", "in m.tool_calls if messages.index(m) > ns.last"),
)
NO_SYSTEM = replace(NO_TOOLS, template=NO_TOOLS.template.replace("!= 'tool'", "!= 'system'"))
# Reads a list of parts alone, as some templates for images do.
PARTS = Family(
    "{% for m in messages %}<start_of_turn>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    + _CALLS
    + "{{ c.function | tojson }}{% endfor %}<end_of_turn>{% endfor %}"
    + _PROMPT
    + "<start_of_turn>{% endif %}",
    (),
    ("<end_of_turn>",),
)
