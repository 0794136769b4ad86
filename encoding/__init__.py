"""OpenAI-style messages to the exact DeepSeek-V4 prompt, and completions back to messages.

    prompt = encoding.render(messages, think="on")          # prompt.text is the exact string
    ids = encoding.Tokenizer("tokenizer.json").encode(prompt)
    message = encoding.parse(completion, thinking=prompt.thinking)

Only the standard library is imported here; `tokenizers` is imported when a Tokenizer is made. Every refused input
raises EncodingError, whose text is one line: the place, what was expected, what was found and what to do.
"""

from encoding.messages import EncodingError
from encoding.parse import Event, StreamParser, parse
from encoding.render import Prompt, messages_from_json, render
from encoding.tokenizer import Tokenizer

__all__ = ["EncodingError", "Event", "Prompt", "StreamParser", "Tokenizer", "messages_from_json", "parse", "render"]
