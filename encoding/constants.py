"""The fixed strings of the DeepSeek-V4 prompt: special tokens, the DSML tags, the template paragraphs.

Source: DeepSeek's preview encoder `encoding/encoding_dsv4.py` (model.md section 12). Bars are U+FF5C, underscores
inside token names U+2581. Ids in the real tokenizer: BOS 0, EOS 1, User 128803, Assistant 128804, think 128821 and
128822, DSML 128825.
"""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
TASK_TOKENS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
SPECIAL_TOKENS = (
    BOS, EOS, USER, ASSISTANT, THINK_START, THINK_END, DSML, LATEST_REMINDER, *TASK_TOKENS.values(),
)  # fmt: skip

# DSML tags. A tag is written `<` + DSML + name: only the DSML part is one token, the rest is ordinary text.
TAG_OPEN = f"<{DSML}"
TAG_CLOSE = f"</{DSML}"
CALLS_OPEN = f"{TAG_OPEN}tool_calls>"
CALLS_CLOSE = f"{TAG_CLOSE}tool_calls>"
INVOKE_OPEN = f'{TAG_OPEN}invoke name="'
INVOKE_CLOSE = f"{TAG_CLOSE}invoke>"
PARAMETER_OPEN = f'{TAG_OPEN}parameter name="'
PARAMETER_CLOSE = f"{TAG_CLOSE}parameter>"

TOOL_RESULT_OPEN = "<tool_result>"
TOOL_RESULT_CLOSE = "</tool_result>"
BLOCK_SEPARATOR = "\n\n"  # between the parts of one user turn, and before tools, response format and tool calls

EFFORT_MAX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)

RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)  # then the JSON

TOOLS_BEFORE = (
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. "
    f'You can invoke tools by writing a "{CALLS_OPEN}" block like the following:\n\n'
    f"{CALLS_OPEN}\n"
    f'{INVOKE_OPEN}$TOOL_NAME">\n'
    f'{PARAMETER_OPEN}$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_CLOSE}\n'
    "...\n"
    f"{INVOKE_CLOSE}\n"
    f'{INVOKE_OPEN}$TOOL_NAME2">\n'
    "...\n"
    f"{INVOKE_CLOSE}\n"
    f"{CALLS_CLOSE}\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
    'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    f"If thinking_mode is enabled (triggered by {THINK_START}), you MUST output your complete reasoning inside "
    f"{THINK_START}...{THINK_END} BEFORE any tool calls or final response.\n\n"
    f"Otherwise, output directly after {THINK_END} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)  # then one JSON function schema per line
TOOLS_AFTER = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)
