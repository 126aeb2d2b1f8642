"""The built-in model with marks for thoughts and tool calls, so that its answers can have both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nvcli.demo import demo_path

TEMPLATE = """
{%- if tools %}Call as <tool_call>{"name": …, "arguments": …}</tool_call>: {{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def give_marks(folder: Path) -> Path:
    """Copy the built-in model with marks for the last tokens of its vocabulary."""
    shutil.copytree(demo_path(), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for token, mark in zip(sorted(vocab, key=vocab.get)[-len(MARKS) :], MARKS, strict=True):
        added = {"id": vocab.pop(token), "content": mark, "special": False, "normalized": False}
        content["added_tokens"].append({**dict.fromkeys(("single_word", "lstrip", "rstrip"), False), **added})
        merges[:] = [pair for pair in merges if "".join(pair) != token]
    file.write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
